/* The files of run and grad: inputs mapped and checked against each other, outputs created together and published together. */
#ifndef CLI_FILES_H
#define CLI_FILES_H

#include "io/map.h"
#include "io/output.h"
#include "options.h"
#include "shard.h"

typedef struct file_tensor {
    bool used, output;
    option_id option;
    const char *argument;
    ra_file_name file;
    ra_path_id id; /* of the file */
    ra_array array;      /* in the file */
    unsigned char *data; /* its first element */
    ra_map map;          /* inputs */
} file_tensor;

typedef struct file_set {
    file_tensor tensors[TENSOR_COUNT];
    bool batched; /* [B, N, H, D] and not [N, H, D] */
    ra_output outputs[TENSOR_COUNT];
    int output_count;
} file_set;

/* Maps the inputs and fills shape and dtype of desc. RA_INVALID: names that are wrong whatever the files hold, or an output
 * that is another file of the call (--trace included). RA_IO: files that do not fit, or an output that would replace tensors
 * of others. */
ra_status files_open(const settings *s, file_set *files, ra_attention_desc *desc);
/* Says what the outputs will hold. */
void files_describe(file_set *files, const ra_attention_desc *desc);
/* Creates the outputs, each under a temporary name. Tensors of one .safetensors share it. */
ra_status files_create(file_set *files);
/* Do all ranks ask for the same outputs? RA_DISAGREE if not. */
typedef struct file_request {
    int first[TENSOR_COUNT];     /* 1 + the first tensor in the same file; 0: not asked for */
    uint64_t name[TENSOR_COUNT]; /* in a .safetensors file, hashed */
    uint64_t file[TENSOR_COUNT]; /* links followed, without its directory, which hosts may know by other names; hashed */
} file_request;
file_request files_request(const file_set *files);
ra_status files_agree(const file_request *all, int ranks);
/* The temporary names, for other processes; and how those get at the same files. */
typedef struct file_names {
    char name[TENSOR_COUNT][64];
} file_names;
void files_names(const file_set *files, file_names *names);
ra_status files_join(file_set *files, const file_names *names);

/* Hands all outputs to the disk. */
ra_status files_sync(file_set *files);
/* Gives all outputs their names, or (joined) leaves that to the one who created them. */
ra_status files_publish(file_set *files);
void files_leave(file_set *files);
/* Closes everything and removes what was not published. */
void files_close(file_set *files);

#endif
