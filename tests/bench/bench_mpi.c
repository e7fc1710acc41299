// One rank of MPI_Allreduce(), timed: FP32 sums in place, as a program without libfp8comm would add up gradients.
//
//   bench_mpi ELEMENTS ROUNDS
//
// A round's time is that of the slowest rank; rank 0 prints "mpi ELEMENTS best MS median MS check SUM".
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static int by_value(const void *one, const void *other) {
  const double difference = *(const double *)one - *(const double *)other;
  return (difference > 0) - (difference < 0);
}

int main(int argc, char **argv) {
  const long elements = argc > 1 ? atol(argv[1]) : 0;
  const int rounds = argc > 2 ? atoi(argv[2]) : 0;
  const size_t huge = (size_t)2 << 20;
  int rank, size;
  if (elements < 1 || elements > 0x7fffffff || rounds < 1) {
    (void)fprintf(stderr, "usage: bench_mpi ELEMENTS ROUNDS\n");
    return 2;
  }
  (void)MPI_Init(&argc, &argv);
  (void)MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  (void)MPI_Comm_size(MPI_COMM_WORLD, &size);
  const size_t bytes = (size_t)elements * sizeof(float);
  float *values = aligned_alloc(huge, (bytes + huge - 1) / huge * huge);
  double *times = calloc((size_t)rounds, sizeof(*times));
  if (!values || !times) return 1;
#if defined(MADV_HUGEPAGE)
  if (getenv("BENCH_HUGE_PAGES")) (void)madvise(values, bytes, MADV_HUGEPAGE);
#endif
  float check = 0;
  for (int round = -2; round < rounds; round++) {
    for (long i = 0; i < elements; i++) values[i] = (float)(rank + 1);
    (void)MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    (void)MPI_Allreduce(MPI_IN_PLACE, values, (int)elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    double taken = MPI_Wtime() - start;
    (void)MPI_Allreduce(MPI_IN_PLACE, &taken, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (round >= 0) times[round] = taken;
    check = values[elements - 1];
  }
  qsort(times, (size_t)rounds, sizeof(*times), by_value);
  if (rank == 0)
    (void)printf("mpi %ld best %.3f median %.3f check %g\n", elements, 1e3 * times[0], 1e3 * times[rounds / 2],
                 (double)check);
  free(values);
  free(times);
  (void)MPI_Finalize();
  return check == (float)(size * (size + 1) / 2) ? 0 : 1;
}
