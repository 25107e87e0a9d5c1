// Contexts that take turns in one thread of the host: each has a stack of its own, and one goes on where another gives
// way. This is what swapcontext does, but for the signals that are let through: for those it asks the system each time,
// which takes longer than anything else here.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace gka::kernels::host {

#if defined(__x86_64__)

/// Where one goes on: the top of its stack, on which lie the registers that a call keeps and an address.
using Context = void*;

/// Leaves in the first where this call returns, and goes on in the second.
__attribute__((naked, noinline)) inline void switch_context(Context*, const Context*) {
  asm("push %rbp\n\t"
      "push %rbx\n\t"
      "push %r12\n\t"
      "push %r13\n\t"
      "push %r14\n\t"
      "push %r15\n\t"
      "mov %rsp, (%rdi)\n\t"
      "mov (%rsi), %rsp\n\t"
      "pop %r15\n\t"
      "pop %r14\n\t"
      "pop %r13\n\t"
      "pop %r12\n\t"
      "pop %rbx\n\t"
      "pop %rbp\n\t"
      "ret");
}

/// One that begins with `enter`, which must not return. Stacks begin and end at multiples of 16.
inline void make_context(Context* made, char* stack, std::size_t bytes, void (*enter)()) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack, bytes);  // of whoever had it before, and never returned
#endif
  auto* top = reinterpret_cast<std::uintptr_t*>(stack + bytes);
  *--top = 0;  // where `enter` would return
  *--top = reinterpret_cast<std::uintptr_t>(enter);
  for (int i = 0; i < 6; ++i) *--top = 0;
  *made = top;
}

#else

using Context = ucontext_t;

inline void switch_context(Context* from, const Context* to) { swapcontext(from, to); }

inline void make_context(Context* made, char* stack, std::size_t bytes, void (*enter)()) {
  getcontext(made);
  made->uc_stack.ss_sp = stack;
  made->uc_stack.ss_size = bytes;
  made->uc_link = nullptr;
  makecontext(made, enter, 0);
}

#endif

}  // namespace gka::kernels::host
