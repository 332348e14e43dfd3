//! The processor's float mode while kernels run.

use super::InstructionPath;

/// Sets the rounding and denormal mode that a path relies on, for the calling thread, until dropped (also by a panic).
///
/// Vector paths need round-to-nearest-even with denormals flushed, in and out; the portable path does that itself and needs the default mode, whatever the caller's thread was set to. Rust code is compiled for the default mode, so between `enter` and the drop only kernels may do float arithmetic: they are called
/// through function pointers, which keeps the compiler from moving arithmetic across the switch, and none of their constants are denormal.
#[derive(Debug)]
pub(crate) struct FloatMode {
    #[cfg(target_arch = "x86_64")]
    before: u32,
}

/// Round to nearest even, all exceptions masked, no flags.
#[cfg(target_arch = "x86_64")]
const DEFAULT: u32 = 0x1f80;
/// Flush-to-zero and denormals-are-zero.
#[cfg(target_arch = "x86_64")]
const FLUSH: u32 = 0x8040;

#[cfg(target_arch = "x86_64")]
impl FloatMode {
    pub(crate) fn enter(path: InstructionPath) -> Self {
        let before = read();
        write(if path == InstructionPath::Portable { DEFAULT } else { DEFAULT | FLUSH });
        Self { before }
    }
}

#[cfg(target_arch = "x86_64")]
impl Drop for FloatMode {
    fn drop(&mut self) {
        write(self.before);
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
    // SAFETY: the values have no reserved bits set: constants of this file, or what `read` returned. What the mode means for compiled code is the subject of the type's documentation.
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
