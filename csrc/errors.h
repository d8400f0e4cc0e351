// The errors the core throws. bindings.cpp maps each kind to a class of dspark_edge/errors.py.
#pragma once

#include <stdexcept>
#include <string>

namespace dspark {

enum class ErrorKind { value, model, pair, context_full, decode };

class Error : public std::runtime_error {
  public:
    Error(ErrorKind kind, const std::string & message) : std::runtime_error(message), kind(kind) {}
    const ErrorKind kind;
};

}  // namespace dspark
