//! Instruction paths: generic kernels, compiled once for each instruction set.

pub(crate) mod activation;
pub(crate) mod attend;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512bf16;
#[cfg(target_arch = "x86_64")]
mod avx512vnni;
mod choice;
mod chunked;
mod codes;
pub(crate) mod float_mode;
pub(crate) mod floats;
mod integers;
pub(crate) mod panel;
pub(crate) mod portable;
mod quantised;
mod steps;
mod streams;
mod trial;
mod tuner;
mod widened;

pub use choice::{PathChoice, wrong_paths};
pub(crate) use choice::{SelectedPath, is_verified};

use panel::Panel;

use crate::phase::CallPhase;
use crate::{Dtype, InstructionPath, NumericsClass, WeightFormat};

/// A compiled kernel.
///
/// # Safety
/// The CPU has the path's features, the thread is in the path's [`float_mode::FloatMode`], the panel's pointers are
/// valid, and no other thread accesses the panel's outputs.
pub(crate) type Kernel = unsafe fn(&Panel);

/// Kernels of one path for one class.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernels {
    pub(crate) gate_up: Kernel,
    pub(crate) down: Kernel,
}

impl Kernels {
    pub(crate) const fn for_phase(self, phase: CallPhase) -> Kernel {
        match phase {
            CallPhase::GateUp => self.gate_up,
            CallPhase::Down => self.down,
        }
    }
}

/// Defines a path's kernels. Only these functions have the path's target features; all generic code is inlined into them.
macro_rules! entry_points {
    ($bf16:ty, $f32:ty $(, $features:literal)?) => {
        pub(super) const BF16: super::Kernels = super::Kernels { gate_up: gate_up_bf16, down: down_bf16 };
        pub(super) const F32: super::Kernels = super::Kernels { gate_up: gate_up_f32, down: down_f32 };
        super::entry_points!(@ gate_up_bf16, gate_up, $bf16 $(, $features)?);
        super::entry_points!(@ down_bf16, down, $bf16 $(, $features)?);
        super::entry_points!(@ gate_up_f32, gate_up, $f32 $(, $features)?);
        super::entry_points!(@ down_f32, down, $f32 $(, $features)?);
    };
    (@ $name:ident, $generic:ident, $step:ty $(, $features:literal)?) => {
        $(#[target_feature(enable = $features)])?
        unsafe fn $name(panel: &super::panel::Panel) {
            // SAFETY: the contract of `super::Kernel` is that of the generic function.
            unsafe { super::panel::$generic::<$step>(panel) }
        }
    };
}
use entry_points;

/// Defines a path's kernels for quantised weights. Each kernel serves both phases and both element types.
macro_rules! quantised_entry_points {
    ($integers:ty $(, $features:literal)?) => {
        pub(super) const INT8: super::Kernels = super::Kernels { gate_up: int8, down: int8 };
        pub(super) const INT4: super::Kernels = super::Kernels { gate_up: int4, down: int4 };
        pub(super) const MXFP4: super::Kernels = super::Kernels { gate_up: mxfp4, down: mxfp4 };
        type Int8Step = super::quantised::QuantisedStep<$integers, { super::quantised::INT8 }, false>;
        type Int4Step = super::quantised::QuantisedStep<$integers, { super::quantised::INT4 }, false>;
        type Mxfp4Step = super::quantised::QuantisedStep<$integers, { super::quantised::MXFP4 }, false>;
        super::entry_points!(@ int8, any_phase, Int8Step $(, $features)?);
        super::entry_points!(@ int4, any_phase, Int4Step $(, $features)?);
        super::entry_points!(@ mxfp4, any_phase, Mxfp4Step $(, $features)?);
    };
}
use quantised_entry_points;

/// Defines a path's kernels for weights that stay fp8. Each kernel serves both phases.
macro_rules! fp8_entry_points {
    ($codes:ty $(, $features:literal)?) => {
        pub(super) const FP8_BF16: super::Kernels = super::Kernels { gate_up: fp8_bf16, down: fp8_bf16 };
        pub(super) const FP8_F32: super::Kernels = super::Kernels { gate_up: fp8_f32, down: fp8_f32 };
        type Fp8InBf16 = super::codes::Fp8Step<$codes, true>;
        type Fp8InF32 = super::codes::Fp8Step<$codes, false>;
        super::entry_points!(@ fp8_bf16, any_phase, Fp8InBf16 $(, $features)?);
        super::entry_points!(@ fp8_f32, any_phase, Fp8InF32 $(, $features)?);
    };
}
use fp8_entry_points;

/// A compiled attention kernel.
///
/// # Safety
/// As for [`Kernel`]; see [`attend::attend`].
pub(crate) type AttendKernel = unsafe fn(&mut attend::AttentionBlock<'_>);

/// Defines a path's attention kernel.
macro_rules! attend_entry_point {
    ($floats:ty $(, $features:literal)?) => {
        $(#[target_feature(enable = $features)])?
        pub(super) unsafe fn attend(block: &mut super::attend::AttentionBlock<'_>) {
            // SAFETY: the contract of `super::AttendKernel` is that of the generic function.
            unsafe { super::attend::attend::<$floats>(block) }
        }
    };
}
use attend_entry_point;

/// Returns a path's attention kernel, for every element type. Only call it if the path is available.
pub(crate) fn attend_kernel(path: InstructionPath) -> AttendKernel {
    match path {
        #[cfg(target_arch = "x86_64")]
        InstructionPath::Avx512Bf16 | InstructionPath::Avx512F | InstructionPath::Avx512Vnni => {
            avx512::attend
        }
        #[cfg(target_arch = "x86_64")]
        InstructionPath::Avx2Fma => avx2::attend,
        _ => portable::attend,
    }
}

/// Returns a path's kernels. Only call them if the path is available.
pub(crate) fn kernels(path: InstructionPath, class: NumericsClass) -> Kernels {
    let (int8, int4, mxfp4) = match path {
        #[cfg(target_arch = "x86_64")]
        InstructionPath::Avx512Vnni => (avx512vnni::INT8, avx512vnni::INT4, avx512vnni::MXFP4),
        // Dot products of bytes need AVX-512 BW and VNNI, which these paths do not require. AVX2 is always available.
        #[cfg(target_arch = "x86_64")]
        InstructionPath::Avx512Bf16 | InstructionPath::Avx512F | InstructionPath::Avx2Fma => {
            (avx2::INT8, avx2::INT4, avx2::MXFP4)
        }
        _ => (portable::INT8, portable::INT4, portable::MXFP4),
    };
    match class.weights {
        WeightFormat::Plain => plain_kernels(path, class.dtype),
        WeightFormat::Int8 => int8,
        WeightFormat::Int4 => int4,
        WeightFormat::Mxfp4 => mxfp4,
        WeightFormat::Fp8 => fp8_kernels(path, class.dtype),
    }
}

/// Returns a path's kernels for weights that stay fp8.
fn fp8_kernels(path: InstructionPath, dtype: Dtype) -> Kernels {
    let (bf16, f32) = match path {
        #[cfg(target_arch = "x86_64")]
        InstructionPath::Avx512Bf16 | InstructionPath::Avx512F | InstructionPath::Avx512Vnni => {
            (avx512::FP8_BF16, avx512::FP8_F32)
        }
        #[cfg(target_arch = "x86_64")]
        InstructionPath::Avx2Fma => (avx2::FP8_BF16, avx2::FP8_F32),
        _ => (portable::FP8_BF16, portable::FP8_F32),
    };
    match dtype {
        Dtype::Bf16 => bf16,
        Dtype::F32 => f32,
    }
}

/// Returns a path's kernels for weights that are not quantised.
fn plain_kernels(path: InstructionPath, dtype: Dtype) -> Kernels {
    let (bf16, f32) = match path {
        #[cfg(target_arch = "x86_64")]
        InstructionPath::Avx512Bf16 => (avx512bf16::BF16, avx512::F32),
        #[cfg(target_arch = "x86_64")]
        InstructionPath::Avx512F | InstructionPath::Avx512Vnni => (avx512::BF16, avx512::F32),
        #[cfg(target_arch = "x86_64")]
        InstructionPath::Avx2Fma => (avx2::BF16, avx2::F32),
        _ => (portable::BF16, portable::F32),
    };
    match dtype {
        Dtype::Bf16 => bf16,
        Dtype::F32 => f32,
    }
}
