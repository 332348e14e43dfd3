//! The processor's rounding and denormal mode while kernels run.

use super::InstructionPath;

/// Sets the rounding and denormal mode that a path needs, for the calling thread, until dropped (also by a panic).
///
/// Vector paths need round-to-nearest-even, with denormal operands and results flushed to zero. The portable path flushes
/// by itself and needs the default mode. Rust code is compiled for the default mode, so only kernels may do float
/// arithmetic between `enter` and the drop. Kernels are called through function pointers, so that the compiler moves no
/// arithmetic across the switch, and none of their constants is denormal.
#[derive(Debug)]
pub(crate) struct FloatMode {
    #[cfg(target_arch = "x86_64")]
    previous: u32,
}

/// Value of MXCSR: round to nearest even, all exceptions masked, no flags.
#[cfg(target_arch = "x86_64")]
const DEFAULT: u32 = 0x1f80;
/// Bits of MXCSR: flush-to-zero and denormals-are-zero.
#[cfg(target_arch = "x86_64")]
const FLUSH: u32 = 0x8040;

#[cfg(target_arch = "x86_64")]
impl FloatMode {
    pub(crate) fn enter(path: InstructionPath) -> Self {
        let previous = read();
        write(if path == InstructionPath::Portable { DEFAULT } else { DEFAULT | FLUSH });
        Self { previous }
    }
}

#[cfg(target_arch = "x86_64")]
impl Drop for FloatMode {
    fn drop(&mut self) {
        write(self.previous);
    }
}

#[cfg(target_arch = "x86_64")]
fn read() -> u32 {
    let mut value = 0u32;
    // SAFETY: stores the 4 bytes of MXCSR to a local variable.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) };
    value
}

#[cfg(target_arch = "x86_64")]
fn write(value: u32) {
    // SAFETY: no reserved bits are set: values are constants of this file, or were returned by `read`. For the effect of
    // the mode on compiled code see the type's documentation.
    unsafe {
        std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack, preserves_flags, readonly))
    };
}

#[cfg(not(target_arch = "x86_64"))]
impl FloatMode {
    pub(crate) fn enter(_path: InstructionPath) -> Self {
        Self {}
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn mode_is_set_and_restored_also_on_unwind() {
        let before = read() & !0x3f;
        {
            let _mode = FloatMode::enter(InstructionPath::Avx2Fma);
            assert_eq!(read() & 0xffc0, 0x9fc0);
        }
        assert_eq!(read() & !0x3f, before);
        let unwound = std::panic::catch_unwind(|| {
            let _mode = FloatMode::enter(InstructionPath::Avx2Fma);
            std::panic::resume_unwind(Box::new(()));
        });
        assert!(unwound.is_err());
        assert_eq!(read() & !0x3f, before);
        let _outer = FloatMode::enter(InstructionPath::Avx2Fma);
        let _inner = FloatMode::enter(InstructionPath::Portable);
        assert_eq!(read() & 0xffc0, 0x1f80);
    }
}
