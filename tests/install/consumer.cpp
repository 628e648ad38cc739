// The header from C++: a descriptor, a failure with its sentence, and a computation.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include <ringattn.h>

int main() {
    ra_attention_desc desc;
    ra_attention_desc_init(&desc);
    desc.seq_q = desc.seq_k = 4;
    desc.heads = 1;
    desc.head_dim = 1000;
    if (ra_attention_desc_check(&desc) != RA_INVALID || !std::strstr(ra_last_error(), "head_dim")) return 1;
    desc.head_dim = 1;
    std::vector<float> q(4), k{1, 2, 3, 4}, v{1, 2, 3, 6}, out(4), lse(4);
    ra_forward_args args{};
    args.q = ra_tensor_bnhd(q.data(), 4, 1, 1);
    args.k = ra_tensor_bnhd(k.data(), 4, 1, 1);
    args.v = ra_tensor_bnhd(v.data(), 4, 1, 1);
    args.out = ra_tensor_bnhd(out.data(), 4, 1, 1);
    args.lse = ra_tensor_lse(lse.data(), 4, 1);
    if (ra_attention(&desc, &args) != RA_OK) {
        std::fprintf(stderr, "%s\n", ra_last_error());
        return 1;
    }
    for (float x : out)
        if (std::fabs(x - 3.0f) > 1e-5f) return 1;
    return 0;
}
