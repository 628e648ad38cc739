#include "device/cuda/layout.h"

int64_t ra_cuda_backend_layout(char *text, int64_t capacity) { return ra_layout_text(text, capacity); }
