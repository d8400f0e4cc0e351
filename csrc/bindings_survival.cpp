// The Python face of the survival model. No logic; the GIL stays: a call takes microseconds.
#include <pybind11/stl.h>

#include <array>
#include <utility>

#include "bindings.h"
#include "errors.h"
#include "survival_model.h"

namespace py = pybind11;

namespace dspark {

namespace {

[[noreturn]] void refuse(const char * field, PyObject * value) {
    throw py::type_error(std::string("signals' ") + field + " is a " + Py_TYPE(value)->tp_name);
}

double as_double(PyObject * value) {
    const double x = PyFloat_AsDouble(value);
    if (x == -1.0 && PyErr_Occurred()) {
        throw py::error_already_set();
    }
    return x;
}

int64_t as_int(PyObject * value) {
    const long long x = PyLong_AsLongLong(value);
    if (x == -1 && PyErr_Occurred()) {
        throw py::error_already_set();
    }
    return x;
}

// Reads a DraftSignals of dspark_edge/signals.py.
class SignalsReader {
  public:
    // signals must outlive this.
    explicit SignalsReader(const py::object & signals) : signals_(signals) {}

    // The draft with another rival.
    py::object with_rival(const py::object & rival) const {
        py::tuple fields(static_cast<size_t>(kFields));
        for (int field = 0; field < kFields; ++field) {
            fields[field] = field == kRival ? rival : value(field);
        }
        return py::type::of(signals_)(*fields);
    }

    size_t n_tokens() const { return static_cast<size_t>(PyList_GET_SIZE(list(kTokens).ptr())); }

    std::vector<int64_t> tokens() const {
        const py::object from = list(kTokens);
        std::vector<int64_t> tokens;
        tokens.reserve(n_tokens());
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(from.ptr()); ++i) {
            tokens.push_back(as_int(PyList_GET_ITEM(from.ptr(), i)));
        }
        return tokens;
    }

    // All but the tokens, of which the number is enough.
    DraftSignals signals() const {
        DraftSignals s;
        s.n_tokens = n_tokens();
        if (!value(kConfidence).is_none()) {
            s.confidence = doubles(list(kConfidence));
        }
        s.certainty = doubles_or_nothing(kCertainty);
        s.match_len = as_int(value(kMatchLen).ptr());
        s.recent = number_or_nothing(kRecent);
        s.rival = rival();
        if (s.match_len > 0) {
            s.recent_copies = number_or_nothing(kRecentCopies);
            s.is_cached = py::bool_(value(kIsCached));
            s.cache_agreement = doubles(list(kCacheAgreement));
            s.cache_count = doubles_or_nothing(kCacheCount);
        }
        return s;
    }

  private:
    enum Field {  // in the order of its constructor
        kTokens,
        kConfidence,
        kCertainty,
        kMatchLen,
        kRecent,
        kRival,
        kRecentCopies,
        kIsCached,
        kCacheAgreement,
        kCacheCount,
        kFields
    };
    static constexpr const char * kFieldNames[kFields] = {
        "tokens", "confidence",    "certainty", "match_len",       "recent",
        "rival",  "recent_copies", "is_cached", "cache_agreement", "cache_count"};

    // Names made once: a call behind a model pass finds nothing in the processor's caches.
    static PyObject * name_of(int field) {
        static const auto names = [] {
            std::array<PyObject *, kFields> made{};
            for (int i = 0; i < kFields; ++i) {
                made[i] = PyUnicode_InternFromString(kFieldNames[i]);
            }
            return made;
        }();
        return names[field];
    }

    py::object value(int field) const {
        auto value =
            py::reinterpret_steal<py::object>(PyObject_GetAttr(signals_.ptr(), name_of(field)));
        if (!value) {
            throw py::error_already_set();
        }
        return value;
    }

    py::object list(int field) const {
        py::object values = value(field);
        if (!PyList_Check(values.ptr())) {
            refuse(kFieldNames[field], values.ptr());
        }
        return values;
    }

    static std::vector<double> doubles(const py::object & list) {
        std::vector<double> values;
        values.reserve(static_cast<size_t>(PyList_GET_SIZE(list.ptr())));
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.ptr()); ++i) {
            values.push_back(as_double(PyList_GET_ITEM(list.ptr(), i)));
        }
        return values;
    }

    std::optional<std::vector<double>> doubles_or_nothing(int field) const {
        const py::object values = list(field);
        if (PyList_GET_SIZE(values.ptr()) == 0) {
            return std::nullopt;
        }
        return doubles(values);
    }

    std::optional<double> number_or_nothing(int field) const {
        const py::object number = value(field);
        if (number.is_none()) {
            return std::nullopt;
        }
        return as_double(number.ptr());
    }

    Comparison rival() const {
        const py::object rival = value(kRival);
        if (rival.is_none()) {
            return {};
        }
        if (!PyTuple_Check(rival.ptr()) || PyTuple_GET_SIZE(rival.ptr()) != 2 ||
            !PyList_Check(PyTuple_GET_ITEM(rival.ptr(), 1))) {
            refuse("rival", rival.ptr());
        }
        const auto logits = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(rival.ptr(), 1));
        return {as_int(PyTuple_GET_ITEM(rival.ptr(), 0)), doubles(logits)};
    }

    const py::object & signals_;
};

py::object against(const SurvivalModel & self, const py::object & signals, const py::object & rival,
                   const py::object & comparison_type) {
    const SignalsReader mine(signals);
    const SignalsReader theirs(rival);
    if (mine.n_tokens() == 0 || theirs.n_tokens() == 0) {
        return signals;
    }
    const Comparison c = self.against(mine.tokens(), theirs.tokens(), theirs.signals());
    return mine.with_rival(make_named(comparison_type, py::make_tuple(c.n_same, c.logits)));
}

py::list features(const SurvivalModel & self, const py::object & signals) {
    const DraftSignals s = SignalsReader(signals).signals();
    const size_t n_features = kFeatures[s.kind()];
    py::list rows;
    for (const FeatureRow & row : self.features(s)) {
        py::tuple values(n_features);
        for (size_t i = 0; i < n_features; ++i) {
            values[i] = row[i];
        }
        rows.append(values);
    }
    return rows;
}

}  // namespace

void bind_survival(py::module_ & m) {
    const py::object comparison_type = named_tuple(m, "Comparison", "n_same logits");
    py::class_<SurvivalModel>(m, "SurvivalNumbers")
        .def(py::init([](const SurvivalModel::Matrix & weights,
                         const SurvivalModel::Matrix & precision, double precision_min,
                         double recent_start, double recent_smoothing) {
                 return std::make_unique<SurvivalModel>(
                     weights, precision, Learning{precision_min, recent_start, recent_smoothing});
             }),
             py::arg("weights"), py::arg("precision"), py::kw_only(), py::arg("precision_min"),
             py::arg("recent_start"), py::arg("recent_smoothing"))
        .def_property_readonly("n_slots", &SurvivalModel::n_slots)
        .def_property_readonly("acceptance_by_position", &SurvivalModel::counts)
        .def_property_readonly("lookup_acceptance_by_position", &SurvivalModel::lookup_counts)
        .def_property_readonly("weights", &SurvivalModel::weights)
        .def_property_readonly("precision", &SurvivalModel::precision)
        .def("set_row", &SurvivalModel::set_row, py::arg("slot"), py::arg("weights"),
             py::arg("precision"))
        .def("features", &features, py::arg("signals"))
        .def(
            "survival",
            [](const SurvivalModel & self, const py::object & signals, double floor) {
                return self.survival(SignalsReader(signals).signals(), floor);
            },
            py::arg("signals"), py::arg("floor") = 0.0)
        .def(
            "against",
            [comparison_type](const SurvivalModel & self, const py::object & signals,
                              const py::object & rival) {
                return against(self, signals, rival, comparison_type);
            },
            py::arg("signals"), py::arg("rival"))
        .def(
            "observe",
            [](SurvivalModel & self, const py::object & signals, int64_t n_correct,
               int64_t n_seen) {
                self.observe(SignalsReader(signals).signals(), n_correct, n_seen);
            },
            py::arg("signals"), py::arg("n_correct"), py::arg("n_seen"));
}

}  // namespace dspark
