#include "cpu_attention.h"

#include "llama_ext.h"

namespace dspark {

CpuAttention::CpuAttention(llama_context * ctx) {
#ifdef _WIN32
    (void)ctx;  // llama.dll does not export get_sched
#else
    const ggml_backend_sched_t sched = ctx->get_sched();
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        const ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        const ggml_backend_dev_t device = ggml_backend_get_device(backend);
        if (device == nullptr || ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            continue;
        }
        cpu_ = backend;
        set_reference_ = reinterpret_cast<SetReference>(ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(device), "ggml_backend_cpu_set_use_ref"));
    }
#endif
}

void CpuAttention::use_one_order(bool on) const {
    if (set_reference_ != nullptr) {
        set_reference_(cpu_, on);
    }
}

}  // namespace dspark
