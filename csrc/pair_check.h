// Whether a drafter can follow a target, and which of a target's layers can be tapped.
#pragma once

#include <string>

#include "drafter_file.h"
#include "llama.h"

namespace dspark {

bool can_tap(const std::string & arch);

// The last layer id that can be tapped, of an architecture whose layers can.
int32_t last_tap(const llama_model * target);

// Throws Error(pair) with what does not fit.
void check_pair(const DrafterFile & file, const llama_model * drafter, const llama_model * target);

}  // namespace dspark
