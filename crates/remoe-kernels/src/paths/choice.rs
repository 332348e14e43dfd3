//! Selects the instruction path of a panel: the fastest one, by measurement, of those that give the right bits.
//!
//! Speed does not follow from the instruction set: the dot product of bfloat16 pairs runs at twice the rate of fused
//! multiply-adds on some processors, and at half of it on others. So each process tries every path of the CPU once for
//! each class that it computes. The path must give the bits of the portable path, and it is timed. Both together take
//! about three milliseconds, too little to be worth a file in which processes would share the result. The path that
//! reads the weights of single rows fastest is found during work ([`super::tuner`]).

use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::panel::MAX_BLOCK_ROWS;
use super::trial::{Reference, Timing};
use super::tuner::{Assignment, OnlineTuner, TimedPanel};
use super::{InstructionPath, Kernels, kernels};
use crate::{Dtype, NumericsClass, WeightFormat};

/// Ranges of row counts with different bottlenecks, each with its own path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Regime {
    /// One row: bound by memory bandwidth.
    One,
    /// Up to one block of rows.
    Few,
    /// More rows: increasingly bound by arithmetic.
    Many,
}

impl Regime {
    pub(crate) const ALL: [Self; 3] = [Self::One, Self::Few, Self::Many];

    const fn of(rows: usize) -> Self {
        match rows {
            0 | 1 => Self::One,
            2..=MAX_BLOCK_ROWS => Self::Few,
            _ => Self::Many,
        }
    }

    /// Returns the number of rows with which the regime is measured. [`Many`](Self::Many) has enough whole blocks that
    /// the work per panel counts as little as in a prefill.
    pub(super) const fn measured_rows(self) -> usize {
        match self {
            Self::One => 1,
            Self::Few => MAX_BLOCK_ROWS / 2,
            Self::Many => 8 * MAX_BLOCK_ROWS,
        }
    }
}

/// Instruction paths by which a pool computes a class, one for each [`Regime`] of row counts. Results do not depend on
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathChoice([InstructionPath; 3]);

impl PathChoice {
    /// Uses one path for any number of rows.
    pub const fn only(path: InstructionPath) -> Self {
        Self([path; 3])
    }

    /// Returns the fastest paths on this machine. The first call for a class measures them, once per process.
    pub fn measured(class: impl Into<NumericsClass>) -> Self {
        static MEASURED: [OnceLock<PathChoice>; CLASSES] = [const { OnceLock::new() }; CLASSES];
        let class = class.into();
        *MEASURED[class.index()].get_or_init(|| fastest(&Timing::new(class).measure(verified_paths(class))))
    }

    /// Returns the paths in use: as [`measured`](Self::measured), but for one row the path that the tuner last found to
    /// be the fastest.
    pub(crate) fn current(class: NumericsClass) -> Self {
        let Self([one, few, many]) = Self::measured(class);
        let tuned = tuner(class).fastest().and_then(|index| verified_paths(class).get(index));
        Self([tuned.map_or(one, |(path, _)| *path), few, many])
    }

    /// Returns the path for `rows` rows.
    pub const fn of_rows(self, rows: usize) -> InstructionPath {
        self.0[Regime::of(rows) as usize]
    }
}

impl fmt::Display for PathChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [one, few, many] = self.0;
        if one == few && few == many {
            return f.pad(one.name());
        }
        write!(f, "{one} (1 row), {few} (2 to {MAX_BLOCK_ROWS}), {many} (more)")
    }
}

const CLASSES: usize = NumericsClass::ALL.len();

/// The path selected for a panel, and the tuner that measures its time, if any.
pub(crate) struct SelectedPath {
    pub(crate) path: InstructionPath,
    timed: Option<(&'static OnlineTuner, TimedPanel)>,
}

impl SelectedPath {
    /// Selects `path` without measuring its time.
    pub(crate) const fn fixed(path: InstructionPath) -> Self {
        Self { path, timed: None }
    }

    /// Selects the path for a panel of `bytes` of weights and `rows` rows. For one row, the tuner decides.
    pub(crate) fn select(class: NumericsClass, rows: usize, bytes: u64) -> Self {
        let tuned = match Regime::of(rows) {
            Regime::One => Self::tuned(tuner(class), verified_paths(class), bytes),
            Regime::Few | Regime::Many => None,
        };
        tuned.unwrap_or_else(|| Self::fixed(PathChoice::measured(class).of_rows(rows)))
    }

    /// Returns the path that a tuner assigns; `None` if it assigns none and has found none to be the fastest.
    fn tuned(tuner: &'static OnlineTuner, paths: &[PathKernels], bytes: u64) -> Option<Self> {
        let (candidate, timed) = match tuner.assign(paths.len(), bytes, Instant::now) {
            Assignment::Timed(panel) => (panel.candidate, Some((tuner, panel))),
            Assignment::Untimed(candidate) | Assignment::Fastest(candidate) => (candidate, None),
            Assignment::Unknown => return None,
        };
        paths.get(candidate).map(|(path, _)| Self { path: *path, timed })
    }

    /// Records the time of the panel, which has just been computed, if its time is measured.
    pub(crate) fn record_time(self) {
        if let Some((tuner, panel)) = self.timed {
            tuner.record_time(&panel, Instant::now());
        }
    }
}

/// Returns this process's tuner for the paths of a class.
fn tuner(class: NumericsClass) -> &'static OnlineTuner {
    static TUNERS: [OnlineTuner; CLASSES] = [const { OnlineTuner::new() }; CLASSES];
    &TUNERS[class.index()]
}

/// A path and its kernels for one class.
pub(super) type PathKernels = (InstructionPath, Kernels);

/// Measured times of a path, by [`Regime`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Measurement {
    pub(super) path: InstructionPath,
    pub(super) times: [Duration; 3],
}

/// Returns the fastest path of each regime (the first of equals), or the portable path if none was measured.
fn fastest(measurements: &[Measurement]) -> PathChoice {
    PathChoice(Regime::ALL.map(|regime| {
        let fastest = measurements.iter().min_by_key(|measurement| measurement.times[regime as usize]);
        fastest.map_or(InstructionPath::Portable, |measurement| measurement.path)
    }))
}

/// Returns the path whose kernels `path` uses for a class. A path without kernels of its own shares those of another.
const fn kernel_path(path: InstructionPath, class: NumericsClass) -> InstructionPath {
    match (path, class.weights, class.dtype) {
        (InstructionPath::Avx512Bf16, WeightFormat::Plain, Dtype::F32)
        | (InstructionPath::Avx512Vnni, WeightFormat::Plain | WeightFormat::Fp8, _)
        | (InstructionPath::Avx512Bf16, WeightFormat::Fp8, _) => InstructionPath::Avx512F,
        (
            InstructionPath::Avx512Bf16 | InstructionPath::Avx512F,
            WeightFormat::Int8 | WeightFormat::Int4 | WeightFormat::Mxfp4,
            _,
        ) => InstructionPath::Avx2Fma,
        _ => path,
    }
}

/// Returns the vector paths of this CPU that have kernels of their own. The portable path is not a candidate, since it is
/// only used without any other.
fn candidates(class: NumericsClass) -> Vec<PathKernels> {
    let is_candidate =
        |path: &InstructionPath| *path != InstructionPath::Portable && kernel_path(*path, class) == *path;
    let paths = InstructionPath::available().into_iter().filter(is_candidate);
    paths.map(|path| (path, kernels(path, class))).collect()
}

/// Returns the candidates that give the bits of the portable path.
fn verified(class: NumericsClass, candidates: Vec<PathKernels>) -> Vec<PathKernels> {
    if candidates.is_empty() {
        return candidates;
    }
    let reference = Reference::new(class);
    candidates.into_iter().filter(|candidate| reference.agrees(*candidate)).collect()
}

/// Returns the candidates that give the right bits. They are tried once per process.
fn verified_paths(class: NumericsClass) -> &'static [PathKernels] {
    static VERIFIED: [OnceLock<Vec<PathKernels>>; CLASSES] = [const { OnceLock::new() }; CLASSES];
    VERIFIED[class.index()].get_or_init(|| verified(class, candidates(class)))
}

/// Reports if a path of this CPU gives the right bits for a class.
pub(crate) fn is_verified(path: InstructionPath, class: NumericsClass) -> bool {
    path == InstructionPath::Portable
        || verified_paths(class).iter().any(|(verified, _)| *verified == kernel_path(path, class))
}

/// Returns the paths of this CPU that give wrong bits for one of `classes`. They are never used. Empty on a sound machine.
pub fn wrong_paths(classes: &[NumericsClass]) -> Vec<(InstructionPath, NumericsClass)> {
    let with_classes = InstructionPath::available()
        .into_iter()
        .flat_map(|path| classes.iter().map(move |class| (path, *class)));
    with_classes.filter(|(path, class)| !is_verified(*path, *class)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::panel::Panel;
    use super::*;
    use proptest::prelude::*;

    const BF16: NumericsClass = NumericsClass { dtype: Dtype::Bf16, weights: WeightFormat::Plain };

    const VECTORS: [InstructionPath; 3] =
        [InstructionPath::Avx512Bf16, InstructionPath::Avx512F, InstructionPath::Avx2Fma];

    fn measured(path: InstructionPath, times: [u64; 3]) -> Measurement {
        Measurement { path, times: times.map(Duration::from_nanos) }
    }

    #[test]
    fn fastest_path_is_chosen_for_each_regime() {
        use InstructionPath::{Avx2Fma, Avx512Bf16, Avx512F, Portable};
        // Half the rate of fused multiply-adds, then twice.
        let xeon = [measured(Avx512Bf16, [9, 30, 290]), measured(Avx512F, [10, 28, 170])];
        assert_eq!(fastest(&xeon), PathChoice([Avx512Bf16, Avx512F, Avx512F]));
        let zen = [measured(Avx512Bf16, [9, 14, 100]), measured(Avx512F, [9, 28, 200])];
        assert_eq!(fastest(&zen), PathChoice::only(Avx512Bf16));
        assert_eq!(
            fastest(&[measured(Avx512F, [2, 2, 2]), measured(Avx2Fma, [1, 2, 3])]).0,
            [Avx2Fma, Avx512F, Avx512F]
        );
        assert_eq!(fastest(&[]), PathChoice::only(Portable));
    }

    proptest! {
        #[test]
        fn choice_has_the_least_measured_times(times in prop::collection::vec(any::<[u64; 3]>(), 1..=3)) {
            let measurements: Vec<Measurement> =
                VECTORS.into_iter().zip(&times).map(|(path, times)| measured(path, *times)).collect();
            let choice = fastest(&measurements);
            for (rows, regime) in [(0, 0), (1, 0), (2, 1), (6, 1), (7, 2), (256, 2)] {
                let of = |path| measurements.iter().find(|m| m.path == path).map(|m| m.times[regime]);
                let least = measurements.iter().map(|m| m.times[regime]).min();
                prop_assert_eq!(of(choice.of_rows(rows)), least);
            }
        }
    }

    /// Runs the portable kernel and flips one bit of the last result.
    ///
    /// # Safety
    /// As for the kernels.
    unsafe fn one_bit_off<const DOWN: bool>(panel: &Panel) {
        let right = kernels(InstructionPath::Portable, BF16);
        // SAFETY: the caller meets the kernel's contract, and the last row has its last column.
        unsafe {
            if DOWN {
                (right.down)(panel)
            } else {
                (right.gate_up)(panel)
            }
            let last = panel.out.add((panel.row_count - 1) * panel.out_stride + (panel.columns - 1) * 2);
            *last ^= 1;
        }
    }

    /// Runs the portable kernel. With more than one block of rows, the first column gets the second one's result.
    ///
    /// # Safety
    /// As for the kernels.
    unsafe fn wrong_for_many(panel: &Panel) {
        let right = kernels(InstructionPath::Portable, BF16);
        // SAFETY: the caller meets the kernel's contract.
        unsafe {
            (right.down)(panel);
            if panel.row_count > MAX_BLOCK_ROWS {
                panel.out.copy_from(panel.out.add(2), 2);
            }
        }
    }

    #[test]
    fn path_with_wrong_bits_is_not_used() {
        let right = kernels(InstructionPath::Portable, BF16);
        let faults: [Kernels; 3] = [
            Kernels { down: one_bit_off::<true>, ..right },
            Kernels { gate_up: one_bit_off::<false>, ..right },
            Kernels { down: wrong_for_many, ..right },
        ];
        for wrong in faults {
            // The wrong path would be the fastest by far.
            let time =
                |(path, _): &PathKernels| measured(*path, if *path == VECTORS[0] { [1; 3] } else { [9; 3] });
            let chosen = |candidates: Vec<PathKernels>| {
                let verified = verified(BF16, candidates);
                fastest(&verified.iter().map(time).collect::<Vec<_>>())
            };
            let next = chosen(vec![(VECTORS[0], wrong), (VECTORS[1], right)]);
            assert_eq!(next, PathChoice::only(VECTORS[1]));
            assert_eq!(chosen(vec![(VECTORS[0], wrong)]), PathChoice::only(InstructionPath::Portable));
            assert_eq!(chosen(vec![(VECTORS[0], right)]), PathChoice::only(VECTORS[0]));
        }
    }

    #[test]
    fn available_paths_agree_and_one_is_chosen() {
        assert_eq!(wrong_paths(&NumericsClass::ALL), []);
        for class in NumericsClass::ALL {
            let choice = PathChoice::measured(class);
            assert_eq!(PathChoice::measured(class), choice, "measured once");
            let candidates = candidates(class);
            for rows in [1, 3, 300] {
                let path = choice.of_rows(rows);
                let is_candidate = candidates.iter().any(|(candidate, _)| *candidate == path);
                assert!(is_candidate || candidates.is_empty() && path == InstructionPath::Portable, "{path}");
            }
        }
    }

    #[test]
    fn single_rows_use_the_tuned_path() {
        static TUNER: OnlineTuner = OnlineTuner::new();
        let right = kernels(InstructionPath::Portable, BF16);
        let paths = VECTORS.map(|path| (path, right));
        let mut counts = [0; 3];
        let selected = loop {
            let selected = SelectedPath::tuned(&TUNER, &paths, 1 << 20).unwrap();
            let index = VECTORS.iter().position(|path| *path == selected.path).unwrap();
            counts[index] += 1;
            if TUNER.fastest().is_some() {
                break selected;
            }
            // The second path is the fastest.
            std::thread::sleep(Duration::from_micros(if index == 1 { 50 } else { 1000 }));
            selected.record_time();
        };
        assert!(counts.iter().all(|count| *count > 32), "{counts:?}");
        assert_eq!(selected.path, VECTORS[1]);
        assert!(selected.timed.is_none());
    }

    #[test]
    fn several_rows_use_the_measured_path() {
        for rows in [2, 6, 7, 300] {
            let selected = SelectedPath::select(BF16, rows, 1 << 20);
            assert_eq!(selected.path, PathChoice::measured(BF16).of_rows(rows));
            assert!(selected.timed.is_none());
        }
    }

    #[test]
    fn choice_displays_its_paths_with_row_counts() {
        let mixed = PathChoice([VECTORS[0], VECTORS[1], VECTORS[1]]);
        assert_eq!(mixed.to_string(), "avx512-bf16 (1 row), avx512f (2 to 6), avx512f (more)");
        assert_eq!(PathChoice::only(VECTORS[2]).to_string(), "avx2-fma");
    }
}
