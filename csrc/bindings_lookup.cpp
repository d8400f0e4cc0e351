// The Python face of prompt lookup. No logic; the GIL stays: a call takes microseconds.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "errors.h"
#include "lookup_index.h"

namespace py = pybind11;

namespace dspark {

namespace {

// Nothing but int32 is taken: a cast could turn one token into another.
using Tokens = py::array_t<int32_t, py::array::c_style>;

std::shared_ptr<LookupCache> make_cache(const Tokens & tokens, const Tokens & lengths) {
    if (tokens.ndim() != 1 || lengths.ndim() != 1) {
        throw Error(ErrorKind::value, "tokens and lengths must have one dimension each");
    }
    return std::make_shared<LookupCache>(tokens.data(), static_cast<size_t>(tokens.size()),
                                         lengths.data(), static_cast<size_t>(lengths.size()));
}

// Appends what `tokens` has behind the sequence so far: the rest of a long list is not looked at.
void extend_to(LookupIndex & self, const py::list & tokens) {
    if (tokens.size() < self.size()) {
        throw Error(ErrorKind::value, "tokens are " + std::to_string(tokens.size()) +
                                          " but the index knows " + std::to_string(self.size()) +
                                          " of them; make a new one");
    }
    std::vector<int32_t> added;
    for (size_t i = self.size(); i < tokens.size(); ++i) {
        py::detail::make_caster<int32_t> token;
        if (!token.load(tokens[i], true)) {
            throw py::type_error("tokens must be integers of 32 bits");
        }
        added.push_back(token);
    }
    self.extend(added);
}

py::object propose(const LookupIndex & self, int32_t n_max, const py::object & type) {
    const LookupProposal p = self.propose(n_max);
    return make_named(type, py::make_tuple(p.tokens, p.match_len, p.is_cached, p.agreement,
                                           p.cache_agreement, p.cache_count));
}

}  // namespace

void bind_lookup(py::module_ & m) {
    py::class_<LookupCache, std::shared_ptr<LookupCache>>(m, "LookupCache")
        .def(py::init(&make_cache), py::arg("tokens"), py::arg("lengths"))
        .def_property_readonly("n_tokens", &LookupCache::n_tokens)
        .def_property_readonly("max_token", &LookupCache::max_token);

    const py::object proposal_type = named_tuple(
        m, "LookupProposal", "tokens match_len is_cached agreement cache_agreement cache_count");
    py::class_<LookupIndex>(m, "LookupIndex")
        .def(py::init([](std::shared_ptr<LookupCache> cache) {
                 return std::make_unique<LookupIndex>(std::move(cache));
             }),
             py::arg("cache") = py::none())
        .def("__len__", &LookupIndex::size)
        .def("extend", &LookupIndex::extend, py::arg("tokens"))
        .def(
            "propose",
            [proposal_type](const LookupIndex & self, int32_t n_max) {
                return propose(self, n_max, proposal_type);
            },
            py::arg("n_max"))
        .def(
            "propose_behind",
            [proposal_type](LookupIndex & self, const py::list & tokens, int32_t n_max) {
                extend_to(self, tokens);
                return propose(self, n_max, proposal_type);
            },
            py::arg("tokens"), py::arg("n_max"));
}

}  // namespace dspark
