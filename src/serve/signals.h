// The signals that end a server: the first lets what runs end, a second stops at once.
#pragma once

#include <pthread.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "serve/service.h"

namespace gka::serve {

/// Asks the service to stop at every one of `signals`, which have SIGTERM among them and are blocked in all threads,
/// for as long as this lives: it ends before the service, which a signal may meet at any time.
class SignalWatch {
 public:
  SignalWatch(Service& service, const sigset_t& signals)
      : thread_([this, &service, signals] {
          for (int signal = 0; sigwait(&signals, &signal) == 0 && !over_;) service.shutdown();
        }) {}
  ~SignalWatch() {
    over_ = true;
    pthread_kill(thread_.native_handle(), SIGTERM);
    thread_.join();
  }
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

 private:
  std::atomic<bool> over_ = false;
  std::thread thread_;
};

}  // namespace gka::serve
