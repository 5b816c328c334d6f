#include "ffi/decode.h"

#include <cstdint>
#include <string>
#include <vector>

namespace xla_lamb {
namespace {

namespace ffi = xla::ffi;

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

  Scratch ScratchResult() {
    const ffi::AnyBuffer buffer = Result("scratch");
    if (ok() && buffer.element_type() != ffi::DataType::U8) Fail("the scratch must be uint8, but has " + Describe(buffer));
    return {buffer.untyped_data(), static_cast<int64_t>(buffer.element_count())};
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

// The number of rows of scalars.
int64_t Rows(const ffi::AnyBuffer& scalars, Reader* reader) {
  const auto dims = scalars.dimensions();
  if (dims.size() < 1 || dims.back() != kNumScalars) {
    reader->Fail("the scalars must have shape [..., " + std::to_string(static_cast<int>(kNumScalars)) + "], but have " + Describe(scalars));
    return 1;
  }
  return static_cast<int64_t>(scalars.element_count()) / kNumScalars;
}

}  // namespace

ffi::Error Decode(Part part, ffi::RemainingArgs args, ffi::RemainingRets rets, const Attributes& attributes, Step* out, Scratch* scratch) {
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
  const size_t results = (part == Part::kStep ? 3 * n : part == Part::kMoments ? 2 * n : n) + 1 + (scratch != nullptr);
  if (args.size() != operands || rets.size() != results) {
    return Invalid("a call for " + std::to_string(n) + " tensors has " + std::to_string(operands) + " operands and " +
                   std::to_string(results) + " results, not " + std::to_string(args.size()) + " and " + std::to_string(rets.size()));
  }

  Reader reader(args, rets);
  Step& step = *out;
  step.part = part;
  step.decay = static_cast<Decay>(attributes.decay);
  step.emit_updates = attributes.emit_updates;
  for (int i = 0; i < 2; ++i) {
    step.norm_bounds[i] = attributes.norm_bounds[i];
    step.ratio_bounds[i] = attributes.ratio_bounds[i];
  }
  const ffi::AnyBuffer scalar_buffer = reader.Operand("scalars");
  step.scalars = scalar_buffer.untyped_data();
  step.rows = Rows(scalar_buffer, &reader);
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
  if (scratch != nullptr) *scratch = reader.ScratchResult();

  if (n > 0) {
    const Types& types = step.types;
    const bool wide = types.parameter == Type::kF64;
    const Type arithmetic = wide ? Type::kF64 : Type::kF32;
    const auto is_table = [&](const ffi::AnyBuffer& buffer, int64_t width) {
      Type type;
      return Decode(buffer.element_type(), &type) && type == arithmetic && buffer.dimensions().size() == 2 &&
             buffer.dimensions()[0] == layers && buffer.dimensions()[1] == width;
    };
    if (scalar_buffer.element_type() != (wide ? ffi::DataType::F64 : ffi::DataType::F32)) {
      reader.Fail("the scalars must be float64 with float64 parameters, else float32, but have " + Describe(scalar_buffer));
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
  return ffi::Error::Success();
}

ffi::Error Decode(ffi::RemainingArgs args, ffi::RemainingRets rets, GradNorm* out, Scratch* scratch) {
  GradNorm& norm = *out;
  Reader reader(args, rets);
  const ffi::AnyBuffer result = reader.Result("norm");
  if (scratch != nullptr) *scratch = reader.ScratchResult();
  const auto dims = result.dimensions();
  if (dims.size() != 2 || dims[1] != 2 || dims[0] < 1) reader.Fail("the result must have shape [rows, 2], but has " + Describe(result));
  norm.rows = reader.ok() ? dims[0] : 1;
  for (size_t i = 0; i < args.size() && reader.ok(); ++i) {
    const ffi::AnyBuffer buffer = reader.Operand("gradient");
    reader.Expect(buffer, buffer, i, &norm.type, "gradient");
    const int64_t size = static_cast<int64_t>(buffer.element_count());
    if (size % norm.rows != 0) {
      reader.Fail("gradient " + std::to_string(i) + " has " + Describe(buffer) + ", which cannot be cut into " + std::to_string(norm.rows) + " rows");
    }
    norm.gradients.push_back({buffer.untyped_data(), size});
  }
  if (reader.ok() && result.element_type() != (norm.type == Type::kF64 ? ffi::DataType::F64 : ffi::DataType::F32)) {
    reader.Fail("the result must be float64 if the gradients are, else float32, but has " + Describe(result));
  }
  if (!reader.ok()) return Invalid(reader.problem());
  norm.result = result.untyped_data();
  return ffi::Error::Success();
}

}  // namespace xla_lamb
