// SPDX-License-Identifier: Apache-2.0
//
// Makes a library of TORCH_LIBRARY operators importable as an (empty) Python module.
//
// DeepSpeed's builders and our own wheel load a compiled library with Python's import, which looks for PyInit_<name>.
// torch's build tools define TORCH_EXTENSION_NAME as that name. Writing the symbol by hand keeps pybind11 and
// torch/extension.h out of the build: the compile then takes seconds instead of close to a minute.
#pragma once

#include <Python.h>

#define FSMOE_JOIN_EXPANDED(a, b) a##b
#define FSMOE_JOIN(a, b) FSMOE_JOIN_EXPANDED(a, b)
#define FSMOE_QUOTE_EXPANDED(a) #a
#define FSMOE_QUOTE(a) FSMOE_QUOTE_EXPANDED(a)

#define FSMOE_PYTHON_MODULE_STUB()                                  \
  PyMODINIT_FUNC FSMOE_JOIN(PyInit_, TORCH_EXTENSION_NAME)(void) {  \
    static PyModuleDef module = {PyModuleDef_HEAD_INIT,             \
                                 FSMOE_QUOTE(TORCH_EXTENSION_NAME), \
                                 nullptr,                           \
                                 -1,                                \
                                 nullptr,                           \
                                 nullptr,                           \
                                 nullptr,                           \
                                 nullptr,                           \
                                 nullptr};                          \
    return PyModule_Create(&module);                                \
  }
