/* The least time that memory allows for an optimizer step: kernels that move a step's bytes and
 * compute next to nothing. They run over the tensors of the benchmark themselves.
 *
 *   passes = 1   reads p, g, m, v and writes p, m, v once: 28 bytes an element.
 *   passes = 2   reads p, g, m, v and writes m, v; then reads p, m, v and writes p: 40 bytes. This is
 *                what LAMB costs where a tensor has left the cache before its norms are known.
 *
 * `keep` is 0 at run time, so that every value stays what it was, which the compiler cannot know.
 */
#include <pthread.h>
#include <stddef.h>

enum { LINE = 16 /* floats in a cache line */ };

typedef struct {
  float *const *p, *const *m, *const *v;
  const float *const *g;
  const size_t *sizes;
  size_t tensors, begin, end; /* this thread's part of all elements, laid end to end */
  size_t ahead;               /* how many floats ahead to prefetch; 0: left to the processor */
  int pass;                   /* 0: everything at once; 1 and 2: the halves of two passes */
  float keep, sum;
} Part;

#define FETCH(a) __builtin_prefetch((a) + i + ahead, 0, 3)
#define FETCH_TO_WRITE(a) __builtin_prefetch((a) + i + ahead, 1, 3)

static inline void single(float *restrict p, const float *restrict g, float *restrict m,
                          float *restrict v, size_t n, float keep) {
  for (size_t i = 0; i < n; i++) {
    m[i] += keep * g[i];
    v[i] += keep * g[i];
    p[i] -= keep * (m[i] + v[i]);
  }
}

static inline float first(const float *restrict p, const float *restrict g, float *restrict m,
                          float *restrict v, size_t n, float keep) {
  float sum = 0;
  for (size_t i = 0; i < n; i++) {
    m[i] += keep * g[i];
    v[i] += keep * g[i];
    sum += p[i];
  }
  return sum;
}

static inline void second(float *restrict p, const float *restrict m, const float *restrict v,
                          size_t n, float keep) {
  for (size_t i = 0; i < n; i++) p[i] -= keep * (m[i] + v[i]);
}

/* Calls BODY(n) for every whole cache line from i on, then for the rest. */
#define BY_LINES(PREFETCH, BODY)                                \
  if (ahead) {                                                  \
    for (; i + LINE <= to; i += LINE) { PREFETCH; BODY(LINE); } \
  }                                                             \
  BODY(to - i);

static void stream(Part *part, size_t k, size_t i, size_t to) {
  float *p = part->p[k], *m = part->m[k], *v = part->v[k], keep = part->keep, sum = 0;
  const float *g = part->g[k];
  size_t ahead = part->ahead;
#define SINGLE(n) single(p + i, g + i, m + i, v + i, n, keep)
#define FIRST(n) sum += first(p + i, g + i, m + i, v + i, n, keep)
#define SECOND(n) second(p + i, m + i, v + i, n, keep)
  if (part->pass == 0) {
    BY_LINES((FETCH_TO_WRITE(p), FETCH(g), FETCH_TO_WRITE(m), FETCH_TO_WRITE(v)), SINGLE)
  } else if (part->pass == 1) {
    BY_LINES((FETCH(p), FETCH(g), FETCH_TO_WRITE(m), FETCH_TO_WRITE(v)), FIRST)
  } else {
    BY_LINES((FETCH_TO_WRITE(p), FETCH(m), FETCH(v)), SECOND)
  }
  part->sum += sum;
}

static void *run(void *argument) {
  Part *part = argument;
  size_t start = 0;
  for (size_t k = 0; k < part->tensors && start < part->end; start += part->sizes[k++]) {
    size_t stop = start + part->sizes[k];
    size_t from = part->begin > start ? part->begin - start : 0;
    size_t to = (part->end < stop ? part->end : stop) - start;
    if (stop > part->begin && from < to) stream(part, k, from, to);
  }
  return NULL;
}

/* Streams over the tensors with `threads` threads (at most 256). The sum is there to be used. */
float floor_step(float *const *p, const float *const *g, float *const *m, float *const *v,
                 const size_t *sizes, size_t tensors, int threads, int passes, size_t ahead,
                 float keep) {
  size_t total = 0;
  for (size_t k = 0; k < tensors; k++) total += sizes[k];
  if (threads > 256) threads = 256;
  float sum = 0;
  for (int pass = passes == 1 ? 0 : 1; pass <= (passes == 1 ? 0 : 2); pass++) {
    Part parts[256];
    pthread_t handles[256];
    int running[256];
    for (int t = 0; t < threads; t++) {
      Part part = {p, m, v, g, sizes, tensors, total / threads * t,
                   t + 1 == threads ? total : total / threads * (t + 1), ahead, pass, keep, 0};
      parts[t] = part;
      /* The last part runs here, and so does one whose thread cannot be had. */
      running[t] = t + 1 < threads && pthread_create(&handles[t], NULL, run, &parts[t]) == 0;
      if (!running[t]) run(&parts[t]);
    }
    for (int t = 0; t < threads; t++) {
      if (running[t]) pthread_join(handles[t], NULL);
      sum += parts[t].sum;
    }
  }
  return sum;
}
