// What Python is told: where the host waits, what no event orders, where a context is made.
#pragma once

#include "device_type.h"

namespace accelerator {

// A Python function that takes a text. It is never freed: threads may report until the process ends.
class Report {
 public:
  void set(py::object function) { function_ = function.is_none() ? nullptr : new py::object(function); }

  void operator()(const std::string& text) const {
    if (!function_ || !Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    try {
      (*function_)(text);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("accelerator");
    }
  }

 private:
  py::object* function_ = nullptr;
};

inline Report on_wait, on_fault, on_context;
inline std::atomic<int64_t> num_waits, num_faults;

// The host waits for the device.
inline void host_waits(const std::string& why) {
  ++num_waits;
  on_wait(why);
}

// Faults are found while locks are held, and Python is told when none is: it may need one of them.
inline std::mutex faults_lock;
inline std::vector<std::string> faults;

inline void fault(const std::string& text) {
  ++num_faults;
  std::lock_guard guard(faults_lock);
  faults.push_back(text);
}

// To be declared before the lock that is held while faults are found.
struct TellFaults {
  ~TellFaults() {
    std::vector<std::string> found;
    {
      std::lock_guard guard(faults_lock);
      found.swap(faults);
    }
    for (const auto& text : found) on_fault(text);
  }
};

}  // namespace accelerator
