// Free and total memory of the devices that llama.cpp sees. Knows no models.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dspark {

struct DeviceMemory {
    std::string name;         // its place in this machine, such as "CUDA0"
    std::string description;  // what is there: maker and model
    std::string kind;         // "cpu", "gpu", "igpu" (shares the system's memory) or "accel"
    uint64_t free_bytes;
    uint64_t total_bytes;
};

// For the CPU ggml reports the total as free: read RAM from the system instead.
std::vector<DeviceMemory> device_memory();

}  // namespace dspark
