// The Python face of the core: types, the GIL, errors. No logic. dspark_edge/_core.pyi is its
// contract.
#include "bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "block_decoder.h"
#include "device_memory.h"
#include "errors.h"
#include "vocabulary.h"

namespace py = pybind11;
using namespace dspark;

namespace {

// Model passes can take seconds: other Python threads go on meanwhile. The core calls back while it
// loads models only.
using NoGil = py::call_guard<py::gil_scoped_release>;

// A message may quote bytes of a damaged file or of half a character: what is not UTF-8 is
// replaced.
py::str text_of(const std::string & what) {
    return py::reinterpret_steal<py::str>(
        PyUnicode_DecodeUTF8(what.data(), static_cast<Py_ssize_t>(what.size()), "replace"));
}

void raise_as_python(const Error & error) {
    if (error.kind == ErrorKind::value) {
        PyErr_SetObject(PyExc_ValueError, text_of(error.what()).ptr());
        return;
    }
    const char * name = "DecodeError";
    switch (error.kind) {
        case ErrorKind::model:
            name = "ModelError";
            break;
        case ErrorKind::pair:
            name = "PairError";
            break;
        case ErrorKind::context_full:
            name = "ContextFullError";
            break;
        default:
            break;
    }
    const py::object type = py::module_::import("dspark_edge.errors").attr(name);
    PyErr_SetObject(type.ptr(), text_of(error.what()).ptr());
}

Draw draw_token(py::array_t<float, py::array::c_style | py::array::forcecast> logits,
                const SamplingParams & sampling, int32_t position,
                const std::vector<llama_token> & before) {
    if (logits.ndim() != 1 || logits.size() < 1) {
        throw Error(ErrorKind::value, "logits must be one row of at least one number");
    }
    if (!sampling.grammar.empty()) {
        throw Error(ErrorKind::value, "draw_token takes no grammar: it has no vocabulary");
    }
    std::vector<float> row(logits.data(), logits.data() + logits.size());
    const auto n = static_cast<int32_t>(row.size());
    for (const llama_token token : before) {
        if (token < 0 || token >= n) {
            throw Error(ErrorKind::value,
                        "token " + std::to_string(token) + " is not a column of the row");
        }
    }
    return Sampler(sampling, nullptr, n).draw({row.data(), n}, position, before, false);
}

py::list as_tuples(const std::vector<std::vector<TokenLogprob>> & lists) {
    py::list result;
    for (const auto & list : lists) {
        py::list pairs;
        for (const auto & [token, logprob] : list) {
            pairs.append(py::make_tuple(token, logprob));
        }
        result.append(pairs);
    }
    return result;
}

// What `progress` raises ends the loading and is raised here, once llama.cpp has been left.
std::unique_ptr<BlockDecoder> make_decoder(const DecoderConfig & config,
                                           const py::object & progress) {
    std::optional<py::error_already_set> raised;
    ProgressCall call;
    if (!progress.is_none()) {
        call = [&](float done) {
            const py::gil_scoped_acquire gil;
            try {
                return !progress(done).is(py::bool_(false));
            } catch (const py::error_already_set & error) {
                raised.emplace(error);
                return false;
            }
        };
    }
    std::unique_ptr<BlockDecoder> decoder;
    try {
        const py::gil_scoped_release no_gil;
        decoder = std::make_unique<BlockDecoder>(config, call);
    } catch (const Error &) {
        if (!raised) {
            throw;
        }
    }
    if (raised) {
        throw py::error_already_set(*raised);
    }
    return decoder;
}

py::list draft(BlockDecoder & self, const std::vector<int32_t> & seq_ids,
               const std::vector<llama_token> & anchors, const py::object & type) {
    std::vector<Draft> drafts;
    {
        const py::gil_scoped_release no_gil;
        drafts = self.draft(seq_ids, anchors);
    }
    py::list result;
    for (const Draft & d : drafts) {
        result.append(make_named(type, py::make_tuple(d.tokens, d.confidence, d.certainty)));
    }
    return result;
}

// Memory of a vector as an array, without a copy: the array owns it.
py::array_t<float> as_array(std::vector<float> && values, std::vector<py::ssize_t> shape) {
    auto * owned = new std::vector<float>(std::move(values));
    const py::capsule owner(owned, [](void * p) { delete static_cast<std::vector<float> *>(p); });
    return py::array_t<float>(std::move(shape), owned->data(), owner);
}

py::tuple tapped_rows(BlockDecoder & self) {
    TappedRows rows;
    {
        const py::gil_scoped_release no_gil;
        rows = self.tapped_rows();
    }
    const auto n_rows = static_cast<py::ssize_t>(rows.n_rows);
    const auto n_feature = static_cast<py::ssize_t>(rows.features.size()) / n_rows;
    const auto n_hidden = static_cast<py::ssize_t>(rows.hidden.size()) / n_rows;
    return py::make_tuple(as_array(std::move(rows.features), {n_rows, n_feature}),
                          as_array(std::move(rows.hidden), {n_hidden == 0 ? 0 : n_rows, n_hidden}));
}

py::list verify(BlockDecoder & self, const std::vector<int32_t> & seq_ids,
                const std::vector<std::vector<llama_token>> & verify_tokens,
                const py::object & type) {
    std::vector<Verdict> verdicts;
    {
        const py::gil_scoped_release no_gil;
        verdicts = self.verify(seq_ids, verify_tokens);
    }
    py::list result;
    for (const Verdict & v : verdicts) {
        result.append(make_named(type, py::make_tuple(v.tokens, v.n_accepted, v.margins,
                                                      as_tuples(v.logprobs), text_of(v.error))));
    }
    return result;
}

// Written in place: states are large, and a second copy would be memory that nobody planned.
py::bytes save_sequence(BlockDecoder & self, int32_t seq_id) {
    size_t n_bytes = 0;
    {
        const py::gil_scoped_release no_gil;
        n_bytes = self.saved_bytes(seq_id);
    }
    const auto blob = py::reinterpret_steal<py::bytes>(
        PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(n_bytes)));
    if (!blob) {
        throw py::error_already_set();
    }
    auto * to = reinterpret_cast<uint8_t *>(PyBytes_AS_STRING(blob.ptr()));
    {
        const py::gil_scoped_release no_gil;
        self.save_sequence(seq_id, to, n_bytes);
    }
    return blob;
}

std::vector<llama_token> restore_sequence(BlockDecoder & self, int32_t seq_id,
                                          const py::bytes & blob) {
    const std::string_view bytes = blob;
    const py::gil_scoped_release no_gil;
    return self.restore_sequence(seq_id, bytes);
}

void bind_records(py::module_ & m) {
    py::class_<SamplingParams>(m, "SamplingConfig")
        .def(py::init([](float temperature, int32_t top_k, float top_p, float min_p,
                         float repeat_penalty, float frequency_penalty, float presence_penalty,
                         int32_t penalty_last_n, int32_t penalty_from, uint64_t seed,
                         std::vector<std::pair<llama_token, float>> logit_bias, std::string grammar,
                         int32_t n_logprobs) {
                 return SamplingParams{temperature,
                                       top_k,
                                       top_p,
                                       min_p,
                                       repeat_penalty,
                                       frequency_penalty,
                                       presence_penalty,
                                       penalty_last_n,
                                       penalty_from,
                                       seed,
                                       std::move(logit_bias),
                                       std::move(grammar),
                                       n_logprobs};
             }),
             py::kw_only(), py::arg("temperature") = 0.0f, py::arg("top_k") = 0,
             py::arg("top_p") = 1.0f, py::arg("min_p") = 0.0f, py::arg("repeat_penalty") = 1.0f,
             py::arg("frequency_penalty") = 0.0f, py::arg("presence_penalty") = 0.0f,
             py::arg("penalty_last_n") = 64, py::arg("penalty_from") = 0, py::arg("seed") = 0,
             py::arg("logit_bias") = std::vector<std::pair<llama_token, float>>{},
             py::arg("grammar") = "", py::arg("n_logprobs") = -1);

    py::class_<DecoderConfig>(m, "DecoderConfig")
        .def(
            py::init([](std::string target_path, uintptr_t target_address, std::string drafter_path,
                        int32_t n_ctx, int32_t n_seq, int32_t n_batch, int32_t n_threads,
                        int32_t n_gpu_layers, int32_t max_verify_len, bool own_cells,
                        bool chain_in_graph, std::string target_id, std::string drafter_id) {
                return DecoderConfig{std::move(target_path),
                                     target_address,
                                     std::move(drafter_path),
                                     n_ctx,
                                     n_seq,
                                     n_batch,
                                     n_threads,
                                     n_gpu_layers,
                                     max_verify_len,
                                     own_cells,
                                     chain_in_graph,
                                     std::move(target_id),
                                     std::move(drafter_id)};
            }),
            py::kw_only(), py::arg("target_path") = "", py::arg("target_address") = 0,
            py::arg("drafter_path") = "", py::arg("n_ctx") = 4096, py::arg("n_seq") = 4,
            py::arg("n_batch") = 512, py::arg("n_threads") = 0, py::arg("n_gpu_layers") = -1,
            py::arg("max_verify_len") = 8, py::arg("own_cells") = false,
            py::arg("chain_in_graph") = false, py::arg("target_id") = "",
            py::arg("drafter_id") = "");

    py::class_<DrafterFile>(m, "DrafterFile")
        .def(py::init<const std::string &>(), py::arg("path"))
        .def_readonly("block_size", &DrafterFile::block_size)
        .def_property_readonly("n_draft", &DrafterFile::n_draft)
        .def_readonly("has_confidence", &DrafterFile::has_confidence)
        .def_property_readonly("has_markov_head",
                               [](const DrafterFile & self) { return bool(self.markov_w1); })
        .def_readonly("sample_from_anchor", &DrafterFile::sample_from_anchor)
        .def_readonly("target_layers", &DrafterFile::target_layers);

    py::class_<DeviceMemory>(m, "DeviceMemory")
        .def_readonly("name", &DeviceMemory::name)
        .def_readonly("description", &DeviceMemory::description)
        .def_readonly("kind", &DeviceMemory::kind)
        .def_readonly("free_bytes", &DeviceMemory::free_bytes)
        .def_readonly("total_bytes", &DeviceMemory::total_bytes);

    py::class_<MemoryUse>(m, "MemoryUse")
        .def_readonly("target_model_bytes", &MemoryUse::target_model)
        .def_readonly("target_context_bytes", &MemoryUse::target_context)
        .def_readonly("target_compute_bytes", &MemoryUse::target_compute)
        .def_readonly("drafter_model_bytes", &MemoryUse::drafter_model)
        .def_readonly("drafter_context_bytes", &MemoryUse::drafter_context)
        .def_readonly("drafter_compute_bytes", &MemoryUse::drafter_compute);
}

void bind_decoder(py::module_ & m) {
    const py::object draft_type = named_tuple(m, "Draft", "tokens confidence certainty");
    const py::object verdict_type =
        named_tuple(m, "Verdict", "tokens n_accepted margins logprobs error");
    py::class_<BlockDecoder>(m, "BlockDecoder")
        .def(py::init(&make_decoder), py::arg("config"), py::arg("progress") = py::none())
        .def("check_sampling", &BlockDecoder::check_sampling, NoGil(), py::arg("sampling"))
        .def("open_sequence", &BlockDecoder::open_sequence, NoGil(), py::arg("seq_id"),
             py::arg("sampling"))
        .def("close_sequence", &BlockDecoder::close_sequence, NoGil(), py::arg("seq_id"))
        .def("n_past", &BlockDecoder::n_past, py::arg("seq_id"))
        .def("prefill", &BlockDecoder::prefill, NoGil(), py::arg("seq_id"), py::arg("tokens"),
             py::arg("for_drafter") = true)
        .def("rewind", &BlockDecoder::rewind, NoGil(), py::arg("seq_id"), py::arg("n_keep"))
        .def("save_sequence", &save_sequence, py::arg("seq_id"))
        .def("restore_sequence", &restore_sequence, py::arg("seq_id"), py::arg("blob"))
        .def(
            "draft",
            [draft_type](BlockDecoder & self, const std::vector<int32_t> & seq_ids,
                         const std::vector<llama_token> & anchors) {
                return draft(self, seq_ids, anchors, draft_type);
            },
            py::arg("seq_ids"), py::arg("anchors"))
        .def(
            "verify",
            [verdict_type](BlockDecoder & self, const std::vector<int32_t> & seq_ids,
                           const std::vector<std::vector<llama_token>> & verify_tokens) {
                return verify(self, seq_ids, verify_tokens, verdict_type);
            },
            py::arg("seq_ids"), py::arg("verify_tokens"))
        .def("tap", &BlockDecoder::tap, NoGil(), py::arg("layers"))
        .def("tapped_rows", &tapped_rows)
        .def("time_step", &BlockDecoder::time_step, NoGil(), py::arg("n_tokens"), py::arg("depth"))
        .def("time_draft", &BlockDecoder::time_draft, NoGil(), py::arg("n_seq"))
        .def("release_drafter_context", &BlockDecoder::release_drafter_context, NoGil())
        .def("release_drafter", &BlockDecoder::release_drafter, NoGil())
        .def("load_drafter_weights", &BlockDecoder::load_drafter_weights, NoGil())
        .def("load_drafter", &BlockDecoder::load_drafter, NoGil())
        .def("close", &BlockDecoder::close, NoGil())
        .def("memory_use", &BlockDecoder::memory_use)
        .def(
            "tokenize",
            [](BlockDecoder & self, const std::string & text, bool add_special,
               bool parse_special) {
                return tokenize(self.pair()->vocab(), text, add_special, parse_special);
            },
            NoGil(), py::arg("text"), py::arg("add_special") = true,
            py::arg("parse_special") = true)
        .def(
            "token_bytes",
            [](BlockDecoder & self, llama_token token, bool special) {
                return py::bytes(token_bytes(self.pair()->vocab(), token, special));
            },
            py::arg("token"), py::arg("special") = false)
        .def(
            "metadata",
            [](BlockDecoder & self, const std::string & key) {
                return metadata(self.pair()->target(), key.c_str());
            },
            py::arg("key"))
        .def_property_readonly("eog_tokens",
                               [](BlockDecoder & self) { return eog_tokens(self.pair()->vocab()); })
        .def_property_readonly(
            "bos_token", [](BlockDecoder & self) { return llama_vocab_bos(self.pair()->vocab()); })
        .def_property_readonly(
            "eos_token", [](BlockDecoder & self) { return llama_vocab_eos(self.pair()->vocab()); })
        .def_property_readonly("n_ctx", [](BlockDecoder & self) { return self.config().n_ctx; })
        .def_property_readonly("n_seq", [](BlockDecoder & self) { return self.config().n_seq; })
        .def_property_readonly("n_batch", [](BlockDecoder & self) { return self.config().n_batch; })
        .def_property_readonly("max_verify_len",
                               [](BlockDecoder & self) { return self.config().max_verify_len; })
        .def_property_readonly("n_vocab", &BlockDecoder::n_vocab)
        .def_property_readonly(
            "n_ctx_train",
            [](BlockDecoder & self) { return llama_model_n_ctx_train(self.pair()->target()); })
        .def_property_readonly("has_drafter", &BlockDecoder::has_drafter)
        .def_property_readonly("block_size", &BlockDecoder::block_size)
        .def_property_readonly("n_draft", &BlockDecoder::n_draft)
        .def_property_readonly("has_confidence", &BlockDecoder::has_confidence)
        .def_property_readonly("can_roll_back",
                               [](BlockDecoder & self) { return self.pair()->can_roll_back(); })
        .def_property_readonly(
            "no_roll_back_reason",
            [](BlockDecoder & self) { return self.pair()->no_roll_back_reason(); })
        .def_property_readonly("is_recurrent",
                               [](BlockDecoder & self) { return self.pair()->is_recurrent(); })
        .def_property_readonly("decode_s", &BlockDecoder::decode_s)
        .def_property_readonly("n_rebuilds", &BlockDecoder::n_rebuilds)
        .def_property_readonly("graph_chain_reason", &BlockDecoder::graph_chain_reason);
}

}  // namespace

py::object dspark::named_tuple(py::module_ & m, const char * name, const char * fields) {
    py::object type = py::module_::import("collections").attr("namedtuple")(name, fields);
    type.attr("__module__") = "dspark_edge._core";
    m.attr(name) = type;
    return type;
}

py::object dspark::make_named(const py::object & type, const py::tuple & values) {
    const auto made = py::reinterpret_steal<py::object>(PyTuple_Type.tp_new(
        reinterpret_cast<PyTypeObject *>(type.ptr()), py::make_tuple(values).ptr(), nullptr));
    if (!made) {
        throw py::error_already_set();
    }
    return made;
}

PYBIND11_MODULE(_core, m) {
    m.doc() = "Drafts blocks and verifies them against llama.cpp contexts.";
    m.attr("built_against") = LLAMA_CPP_PYTHON_VERSION;
    py::register_local_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) {
                std::rethrow_exception(pointer);
            }
        } catch (const Error & error) {
            raise_as_python(error);
        }
    });
    bind_records(m);
    bind_decoder(m);
    bind_lookup(m);
    bind_survival(m);
    m.def("device_memory", &device_memory);
    m.def(
        "draw_token",
        [](const py::array_t<float, py::array::c_style | py::array::forcecast> & logits,
           const SamplingParams & sampling, int32_t position,
           const std::vector<llama_token> & before) {
            const Draw draw = draw_token(logits, sampling, position, before);
            return py::make_tuple(draw.token, draw.margin);
        },
        py::arg("logits"), py::arg("sampling"), py::arg("position"),
        py::arg("before") = std::vector<llama_token>{});
    m.def(
        "gumbel_noise",
        [](uint64_t seed, int32_t position, llama_token token) {
            return Noise(seed, position).gumbel(token);
        },
        py::arg("seed"), py::arg("position"), py::arg("token"));
}
