// What the files of the Python face share.
#pragma once

#include <pybind11/pybind11.h>

namespace dspark {

// What a round returns are named tuples, made in one go: code that runs once a round runs with cold
// caches behind a model pass, and an attribute that is converted at each access is dear there.
pybind11::object named_tuple(pybind11::module_ & m, const char * name, const char * fields);
// One of such a type. Its own constructor is Python code, which is passed by.
pybind11::object make_named(const pybind11::object & type, const pybind11::tuple & values);

void bind_lookup(pybind11::module_ & m);
void bind_survival(pybind11::module_ & m);

}  // namespace dspark
