/* A program with an MPI of its own, in which the even ranks form a ring and the odd ones another:
 *
 *     mpicc ring_of_a_part.c $(pkg-config --cflags --libs ringattn) -lm -o ring_of_a_part && mpirun -n 4 ./ring_of_a_part
 *
 * The library duplicates the communicator that it is given and leaves the program's messages alone. Its heartbeats go on
 * while the program is busy elsewhere only with MPI_THREAD_MULTIPLE; with less it works too, and grants the ranks more time. */
#include <math.h>
#include <mpi.h>
#include <ringattn.h>
#include <ringattn_mpi.h>
#include <stdio.h>
#include <stdlib.h>

/* After an error of communication MPI_Finalize could wait for a dead rank. */
static void check(ra_status status, const char *what) {
    if (status == RA_OK) return;
    fprintf(stderr, "%s: %s\n", what, ra_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* q = 0 makes all weights equal, and v is 1: out is 1. */
static double largest_error(ra_comm *comm) {
    enum { N = 1000, HEADS = 2, DIM = 16 };
    ra_attention_desc desc;
    ra_attention_desc_init(&desc);
    desc.seq_q = desc.seq_k = N;
    desc.heads = HEADS;
    desc.head_dim = DIM;
    desc.threads = 1;
    ra_shard rows;
    ra_plan *plan;
    check(ra_shard_rows(&desc, ra_comm_rank(comm), ra_comm_size(comm), &rows, NULL), "rows");
    check(ra_plan_create(comm, &desc, &plan), "plan");
    size_t count = (size_t)(rows.count * HEADS * DIM);
    float *q = calloc(count, sizeof *q), *v = malloc(count * sizeof *v), *out = malloc(count * sizeof *out);
    if (!q || !v || !out) MPI_Abort(MPI_COMM_WORLD, 1);
    for (size_t i = 0; i < count; i++) v[i] = 1;
#define TENSOR(x) ra_tensor_bnhd(x, rows.count, HEADS, DIM)
    check(ra_forward(plan, &(ra_forward_args){.q = TENSOR(q), .k = TENSOR(q), .v = TENSOR(v), .out = TENSOR(out)}), "forward");
    double worst = 0;
    for (size_t i = 0; i < count; i++) worst = fmax(worst, fabs((double)out[i] - 1));
    free(q), free(v), free(out);
    ra_plan_destroy(plan);
    return worst;
}

int main(int argc, char **argv) {
    int level, rank;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm part;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &part);

    ra_comm *comm;
    check(ra_comm_mpi(part, &comm), "communicator");
    double worst = largest_error(comm);
    printf("rank %d is rank %d of %d in its ring: largest error %.2g\n", rank, ra_comm_rank(comm), ra_comm_size(comm), worst);

    ra_comm_destroy(comm); /* before its communicator is freed and MPI finalized */
    MPI_Comm_free(&part);
    MPI_Finalize();
    return worst > 1e-5;
}
