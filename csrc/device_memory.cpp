#include "device_memory.h"

#include "ggml-backend.h"

namespace dspark {

std::vector<DeviceMemory> device_memory() {
    std::vector<DeviceMemory> devices;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        size_t free_bytes = 0;
        size_t total_bytes = 0;
        ggml_backend_dev_memory(device, &free_bytes, &total_bytes);
        std::string kind = "accel";
        switch (ggml_backend_dev_type(device)) {
            case GGML_BACKEND_DEVICE_TYPE_CPU:
                kind = "cpu";
                break;
            case GGML_BACKEND_DEVICE_TYPE_GPU:
                kind = "gpu";
                break;
            case GGML_BACKEND_DEVICE_TYPE_IGPU:
                kind = "igpu";
                break;
            default:
                break;
        }
        devices.push_back({ggml_backend_dev_name(device), ggml_backend_dev_description(device),
                           kind, free_bytes, total_bytes});
    }
    return devices;
}

}  // namespace dspark
