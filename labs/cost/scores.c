// What bounds one query of grouped heads on a CPU? The scores of 64k keys of 4 heads of 128, four
// queries a head, in float32, by hand on two cores: XLA's loop for the same is in
// treeattn/kernel/products.py.
//
//   gcc -O3 -funroll-loops -mavx2 -mfma -pthread benchmarks/scores.c -o /tmp/scores && /tmp/scores
//
// Prints milliseconds, the fastest of 15 rounds. Where "scores" is about the sum of "read" and "from
// the cache", reading and computing do not hide each other; where "prefetched" is faster, nothing but
// fetching ahead is missing.

#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { KEYS = 65536, HEADS = 4, GROUP = 4, DIM = 128, BLOCK = 1024, CORES = 2, LANES = 8 };
enum { READ, FROM_THE_CACHE, SCORES, PREFETCHED, ALL };
static const char *NAMES[] = {"read", "from the cache", "scores", "prefetched"};
static const long AHEAD = 8192 / sizeof(float);
static float *keys, *queries, *out;
static int mode;

static float sum(__m256 x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

static void read_key(const float *k, float *s) {
  __m256 largest = _mm256_loadu_ps(k);
  for (int i = LANES; i < DIM; i += LANES) largest = _mm256_max_ps(largest, _mm256_loadu_ps(k + i));
  s[0] = sum(largest);
}

static void score_key(const float *k, const float *q, float *s, int fetch) {
  __m256 sums[GROUP];
  for (int g = 0; g < GROUP; g++) sums[g] = _mm256_setzero_ps();
  for (int i = 0; i < DIM; i += LANES) {
    __m256 x = _mm256_loadu_ps(k + i);
    if (fetch && i % 16 == 0) _mm_prefetch((const char *)(k + i + AHEAD), _MM_HINT_T0);
    for (int g = 0; g < GROUP; g++)
      sums[g] = _mm256_fmadd_ps(x, _mm256_loadu_ps(q + g * DIM + i), sums[g]);
  }
  for (int g = 0; g < GROUP; g++) s[g] = sum(sums[g]);
}

static void *work(void *core) {
  for (int block = 0; block < KEYS; block += BLOCK) {
    int first = (mode == FROM_THE_CACHE ? 0 : block) + (int)(long)core * (BLOCK / CORES);
    for (int n = first; n < first + BLOCK / CORES; n++)
      for (int h = 0; h < HEADS; h++) {
        const float *k = keys + ((long)n * HEADS + h) * DIM, *q = queries + h * GROUP * DIM;
        float *s = out + ((long)n * HEADS + h) * GROUP;
        if (mode == READ) read_key(k, s);
        else score_key(k, q, s, mode == PREFETCHED);
      }
  }
  return NULL;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return 1e3 * t.tv_sec + 1e-6 * t.tv_nsec;
}

int main(void) {
  long size = (long)KEYS * HEADS * DIM;
  keys = malloc(sizeof(float) * (size + AHEAD));
  queries = malloc(sizeof(float) * HEADS * GROUP * DIM);
  out = calloc((long)KEYS * HEADS * GROUP, sizeof(float));
  for (long i = 0; i < size + AHEAD; i++) keys[i] = i % 7;
  for (int i = 0; i < HEADS * GROUP * DIM; i++) queries[i] = i % 5;
  for (mode = 0; mode < ALL; mode++) {
    double best = 1e9;
    for (int round = 0; round < 15; round++) {
      pthread_t threads[CORES];
      double began = now();
      for (long i = 0; i < CORES; i++) pthread_create(threads + i, NULL, work, (void *)i);
      for (int i = 0; i < CORES; i++) pthread_join(threads[i], NULL);
      double took = now() - began;
      best = took < best ? took : best;
    }
    printf("%-15s %5.1f ms\n", NAMES[mode], best);
  }
}
