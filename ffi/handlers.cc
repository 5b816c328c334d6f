#include "ffi/handlers.h"

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/kernel.h"

namespace xla_lamb {
namespace {

namespace ffi = xla::ffi;

// The attributes that all parts of a step share: what is fixed when the optimizer is built. One number for each tensor, or one for all.
struct Attributes {
  ffi::Span<const int32_t> decays;      // 0 or 1
  ffi::Span<const int32_t> adapts;      // Adapt
  ffi::Span<const int32_t> layer_axes;  // leading axes that index independent layers, those of the batch included
  int32_t decay;                        // Decay
  double norm_bounds[2];
  double ratio_bounds[2];
  bool emit_updates;
};

ffi::Error Invalid(const std::string& what) { return ffi::Error::InvalidArgument("xla_lamb: " + what); }

bool Decode(ffi::DataType type, Type* out) {
  switch (type) {
    case ffi::DataType::F32: *out = Type::kF32; return true;
    case ffi::DataType::BF16: *out = Type::kBF16; return true;
    case ffi::DataType::F16: *out = Type::kF16; return true;
    case ffi::DataType::F64: *out = Type::kF64; return true;
    default: return false;
  }
}

std::string Describe(const ffi::AnyBuffer& buffer) {
  std::string text = "type " + std::to_string(static_cast<int>(buffer.element_type())) + ", shape [";
  for (size_t i = 0; i < buffer.dimensions().size(); ++i) {
    text += (i ? ", " : "") + std::to_string(buffer.dimensions()[i]);
  }
  return text + "]";
}

bool SameShape(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  if (a.dimensions().size() != b.dimensions().size()) return false;
  for (size_t i = 0; i < a.dimensions().size(); ++i) {
    if (a.dimensions()[i] != b.dimensions()[i]) return false;
  }
  return true;
}

// Walks the operands or the results in order, and remembers the first thing that is not as it must be.
class Reader {
 public:
  Reader(ffi::RemainingArgs args, ffi::RemainingRets rets) : args_(args), rets_(rets) {}

  bool ok() const { return problem_.empty(); }
  const std::string& problem() const { return problem_; }
  void Fail(const std::string& problem) {
    if (ok()) problem_ = problem;
  }

  // A buffer of no element, so that a caller can go on and report once.
  ffi::AnyBuffer Operand(const char* what) {
    auto buffer = args_.get<ffi::AnyBuffer>(operand_);
    if (!buffer.has_value()) {
      Fail("operand " + std::to_string(operand_) + " (" + what + ") is missing");
      return Nothing();
    }
    ++operand_;
    return *buffer;
  }

  ffi::AnyBuffer Result(const char* what) {
    auto buffer = rets_.get<ffi::AnyBuffer>(result_);
    if (!buffer.has_value()) {
      Fail("result " + std::to_string(result_) + " (" + what + ") is missing");
      return Nothing();
    }
    ++result_;
    return **buffer;
  }

  // Tensors of one kind have one type, and the shape of their parameter.
  void Expect(const ffi::AnyBuffer& buffer, const ffi::AnyBuffer& like, size_t index, Type* type, const char* what) {
    Type found;
    if (!Decode(buffer.element_type(), &found)) {
      Fail(std::string(what) + " " + std::to_string(index) + " must be float32, bfloat16, float16 or float64, but has " +
           Describe(buffer));
      return;
    }
    if (index == 0) *type = found;
    if (found != *type) Fail(std::string(what) + "s of one call must have one type, but tensor " + std::to_string(index) + " has " + Describe(buffer));
    if (!SameShape(buffer, like)) Fail(std::string(what) + " " + std::to_string(index) + " has " + Describe(buffer) + ", its parameter " + Describe(like));
  }

 private:
  static ffi::AnyBuffer Nothing() {
    static const XLA_FFI_Buffer nothing = [] {
      XLA_FFI_Buffer buffer = {};
      buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
      buffer.dtype = XLA_FFI_DataType_F32;
      return buffer;
    }();
    return ffi::AnyBuffer(&nothing);
  }

  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  size_t operand_ = 0;
  size_t result_ = 0;
  std::string problem_;
};

// The scalars as doubles: they are float32, or float64 with float64 parameters.
std::vector<double> ReadScalars(const ffi::AnyBuffer& buffer, Reader* reader) {
  const auto dims = buffer.dimensions();
  if (dims.size() < 1 || dims.back() != kNumScalars) {
    reader->Fail("the scalars must have shape [..., " + std::to_string(static_cast<int>(kNumScalars)) + "], but have " + Describe(buffer));
    return std::vector<double>(kNumScalars);
  }
  const size_t count = buffer.element_count();
  if (buffer.element_type() == ffi::DataType::F64) {
    const double* values = static_cast<const double*>(buffer.untyped_data());
    return std::vector<double>(values, values + count);
  }
  if (buffer.element_type() == ffi::DataType::F32) {
    const float* values = static_cast<const float*>(buffer.untyped_data());
    return std::vector<double>(values, values + count);
  }
  reader->Fail("the scalars must be float32 or float64, but have " + Describe(buffer));
  return std::vector<double>(kNumScalars);
}

Pool PoolOf(ffi::ThreadPool& threads) {
  Pool pool;
  pool.threads = threads.num_threads();
  pool.schedule = [&threads](std::function<void()> task) { threads.Schedule(std::move(task)); };
  return pool;
}

ffi::Error Run(Part part, ffi::ThreadPool& threads, ffi::RemainingArgs args, ffi::RemainingRets rets, const Attributes& attributes) {
  const bool moments = part != Part::kApply, apply = part != Part::kMoments;
  const size_t n = attributes.decays.size();
  if (attributes.adapts.size() != n || attributes.layer_axes.size() != n) {
    return Invalid("decays, adapts and layer_axes must have one number for each tensor, but have " + std::to_string(n) + ", " +
                   std::to_string(attributes.adapts.size()) + " and " + std::to_string(attributes.layer_axes.size()));
  }
  if (attributes.decay < 0 || attributes.decay > static_cast<int32_t>(Decay::kL2)) {
    return Invalid("decay must be 0, 1 or 2, not " + std::to_string(attributes.decay));
  }
  const size_t operands = 1 + (part == Part::kApply ? 1 + 3 * n : 4 * n);
  const size_t results = (part == Part::kStep ? 3 * n : part == Part::kMoments ? 2 * n : n) + 1;
  if (args.size() != operands || rets.size() != results) {
    return Invalid("a call for " + std::to_string(n) + " tensors has " + std::to_string(operands) + " operands and " +
                   std::to_string(results) + " results, not " + std::to_string(args.size()) + " and " + std::to_string(rets.size()));
  }

  Reader reader(args, rets);
  Step step;
  step.part = part;
  step.decay = static_cast<Decay>(attributes.decay);
  step.emit_updates = attributes.emit_updates;
  for (int i = 0; i < 2; ++i) {
    step.norm_bounds[i] = attributes.norm_bounds[i];
    step.ratio_bounds[i] = attributes.ratio_bounds[i];
  }
  const ffi::AnyBuffer scalar_buffer = reader.Operand("scalars");
  const std::vector<double> scalars = ReadScalars(scalar_buffer, &reader);
  step.scalars = scalars.data();
  step.rows = static_cast<int64_t>(scalars.size() / kNumScalars);
  const ffi::AnyBuffer sums_in = apply && !moments ? reader.Operand("sums") : scalar_buffer;

  std::vector<ffi::AnyBuffer> shapes;
  step.tensors.resize(n);
  int64_t layers = 0;
  for (size_t i = 0; i < n; ++i) {
    const ffi::AnyBuffer parameter = reader.Operand("parameter");
    shapes.push_back(parameter);
    reader.Expect(parameter, parameter, i, &step.types.parameter, "parameter");
    Tensor& tensor = step.tensors[i];
    tensor.parameter = parameter.untyped_data();
    tensor.size = static_cast<int64_t>(parameter.element_count());
    tensor.decays = attributes.decays[i] != 0;
    tensor.adapt = static_cast<Adapt>(attributes.adapts[i]);
    const int64_t axes = attributes.layer_axes[i];
    if (axes < 0 || axes > static_cast<int64_t>(parameter.dimensions().size())) {
      reader.Fail("tensor " + std::to_string(i) + " has " + Describe(parameter) + " and cannot have " + std::to_string(axes) + " layer axes");
      break;
    }
    for (int64_t axis = 0; axis < axes; ++axis) tensor.layers *= parameter.dimensions()[axis];
    if (tensor.layers % step.rows != 0) {
      reader.Fail("tensor " + std::to_string(i) + " has " + std::to_string(tensor.layers) + " layers, which " +
                  std::to_string(step.rows) + " rows of scalars do not divide");
    }
    layers += tensor.layers;
  }
  const auto read = [&](const char* what, Type* type, const void* Tensor::*field) {
    for (size_t i = 0; i < n && reader.ok(); ++i) {
      const ffi::AnyBuffer buffer = reader.Operand(what);
      reader.Expect(buffer, shapes[i], i, type, what);
      step.tensors[i].*field = buffer.untyped_data();
    }
  };
  const auto write = [&](const char* what, Type* type, void* Tensor::*field) {
    for (size_t i = 0; i < n && reader.ok(); ++i) {
      const ffi::AnyBuffer buffer = reader.Result(what);
      reader.Expect(buffer, shapes[i], i, type, what);
      step.tensors[i].*field = buffer.untyped_data();
    }
  };
  if (moments) read("gradient", &step.types.gradient, &Tensor::gradient);
  read("first moment", &step.types.first_moment, &Tensor::first_moment);
  read("second moment", &step.types.second_moment, &Tensor::second_moment);

  Type first_out = step.types.first_moment, second_out = step.types.second_moment;
  if (apply) write(step.emit_updates ? "update" : "new parameter", &step.types.output, &Tensor::output);
  if (moments) write("new first moment", &first_out, &Tensor::first_moment_out);
  if (moments) write("new second moment", &second_out, &Tensor::second_moment_out);
  const int64_t columns = apply ? 3 : 2;
  const ffi::AnyBuffer table = reader.Result(apply ? "trust ratios" : "sums");

  if (n > 0) {
    const Types& types = step.types;
    const bool wide = types.parameter == Type::kF64;
    const Type arithmetic = wide ? Type::kF64 : Type::kF32;
    const auto is_table = [&](const ffi::AnyBuffer& buffer, int64_t width) {
      Type type;
      return Decode(buffer.element_type(), &type) && type == arithmetic && buffer.dimensions().size() == 2 &&
             buffer.dimensions()[0] == layers && buffer.dimensions()[1] == width;
    };
    if ((scalar_buffer.element_type() == ffi::DataType::F64) != wide) {
      reader.Fail("the scalars must be float64 if and only if the parameters are");
    }
    if (types.first_moment != types.second_moment || first_out != types.first_moment || second_out != types.second_moment ||
        (wide ? types.first_moment != Type::kF64 : types.first_moment != Type::kF32 && types.first_moment != Type::kBF16)) {
      reader.Fail("both moments, old and new, must be float32 or both bfloat16; float64 with float64 parameters");
    }
    if (apply && !step.emit_updates && types.output != types.parameter) reader.Fail("new parameters must have the parameters' type");
    if (reader.ok() && !is_table(table, columns)) {
      reader.Fail("the last result must have the type of the arithmetic and shape [" + std::to_string(layers) + ", " +
                  std::to_string(columns) + "], but has " + Describe(table));
    }
    if (reader.ok() && !moments && !is_table(sums_in, 2)) {
      reader.Fail("the sums must have the type of the arithmetic and shape [" + std::to_string(layers) + ", 2], but have " + Describe(sums_in));
    }
  }
  if (!reader.ok()) return Invalid(reader.problem());

  (apply ? step.trust : step.sums) = table.untyped_data();
  if (!moments) step.sums = sums_in.untyped_data();
  xla_lamb::Run(step, PoolOf(threads));
  return ffi::Error::Success();
}

template <Part kPart>
ffi::Error RunPart(ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Span<const int32_t> decays,
                   ffi::Span<const int32_t> adapts, ffi::Span<const int32_t> layer_axes, int32_t decay, double norm_low,
                   double norm_high, double ratio_low, double ratio_high, bool emit_updates) {
  const Attributes attributes = {decays, adapts, layer_axes, decay, {norm_low, norm_high}, {ratio_low, ratio_high}, emit_updates};
  return Run(kPart, threads, args, rets, attributes);
}

#define XLA_LAMB_BIND_STEP()                              \
  ffi::Ffi::Bind()                                        \
      .Ctx<ffi::ThreadPool>()                             \
      .RemainingArgs() /* see xla_lamb/step.py */         \
      .RemainingRets()                                    \
      .Attr<ffi::Span<const int32_t>>("decays")           \
      .Attr<ffi::Span<const int32_t>>("adapts")           \
      .Attr<ffi::Span<const int32_t>>("layer_axes")       \
      .Attr<int32_t>("decay")                             \
      .Attr<double>("norm_low")                           \
      .Attr<double>("norm_high")                          \
      .Attr<double>("ratio_low")                          \
      .Attr<double>("ratio_high")                         \
      .Attr<bool>("emit_updates")

// Results: [rows, 2] of float32 or, for float64 gradients, float64: the sum of squares, and 1 if every element is finite, else 0.
ffi::Error RunGradNorm(ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> result) {
  GradNorm norm;
  const auto dims = result->dimensions();
  if (dims.size() != 2 || dims[1] != 2 || dims[0] < 1) return Invalid("the result must have shape [rows, 2], but has " + Describe(*result));
  norm.rows = dims[0];
  for (size_t i = 0; i < args.size(); ++i) {
    const ffi::AnyBuffer buffer = *args.get<ffi::AnyBuffer>(i);
    Type type;
    if (!Decode(buffer.element_type(), &type)) return Invalid("gradient " + std::to_string(i) + " must be float32, bfloat16, float16 or float64, but has " + Describe(buffer));
    if (i == 0) norm.type = type;
    if (type != norm.type) return Invalid("gradients of one call must have one type, but gradient " + std::to_string(i) + " has " + Describe(buffer));
    const int64_t size = static_cast<int64_t>(buffer.element_count());
    if (size % norm.rows != 0) return Invalid("gradient " + std::to_string(i) + " has " + Describe(buffer) + ", which cannot be cut into " + std::to_string(norm.rows) + " rows");
    norm.gradients.push_back({buffer.untyped_data(), size});
  }
  const bool wide = norm.type == Type::kF64;
  if (result->element_type() != (wide ? ffi::DataType::F64 : ffi::DataType::F32)) {
    return Invalid("the result must be float64 if the gradients are, else float32, but has " + Describe(*result));
  }
  std::vector<double> sums(norm.rows);
  const auto finite = std::make_unique<bool[]>(norm.rows);
  norm.sum_of_squares = sums.data();
  norm.finite = finite.get();
  xla_lamb::Run(norm, PoolOf(threads));
  for (int64_t row = 0; row < norm.rows; ++row) {
    if (wide) {
      double* out = static_cast<double*>(result->untyped_data()) + 2 * row;
      out[0] = sums[row];
      out[1] = finite[row];
    } else {
      float* out = static_cast<float*>(result->untyped_data()) + 2 * row;
      out[0] = static_cast<float>(sums[row]);
      out[1] = finite[row];
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_Error* StepOnCpu(XLA_FFI_CallFrame* frame) {
  static const auto* handler = XLA_LAMB_BIND_STEP().To(RunPart<Part::kStep>).release();
  return handler->Call(frame);
}

XLA_FFI_Error* MomentsOnCpu(XLA_FFI_CallFrame* frame) {
  static const auto* handler = XLA_LAMB_BIND_STEP().To(RunPart<Part::kMoments>).release();
  return handler->Call(frame);
}

XLA_FFI_Error* ApplyOnCpu(XLA_FFI_CallFrame* frame) {
  static const auto* handler = XLA_LAMB_BIND_STEP().To(RunPart<Part::kApply>).release();
  return handler->Call(frame);
}

XLA_FFI_Error* GradNormOnCpu(XLA_FFI_CallFrame* frame) {
  static const auto* handler =
      ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().Ret<ffi::AnyBuffer>().To(RunGradNorm).release();
  return handler->Call(frame);
}

}  // namespace xla_lamb
