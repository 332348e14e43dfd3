//! Which path computes what: the fastest of those that compute the right bits, by measurement.
//!
//! An instruction's name tells nothing about its speed (the dot product of bfloat16 pairs runs at twice the rate of
//! fused multiply-adds on some processors and at half of it on others), so every path that the CPU has is tried once
//! per process and class that is computed: it must give the bits of the portable path, and it is timed. Both together
//! take about three milliseconds: too little for a file in which processes would share the outcome. Which path reads
//! the weights of one row the fastest is found out at work ([`super::contest`]).

use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::contest::{Contest, PanelTurn, TimedPanel};
use super::panel::ROWS;
use super::trial::{Reference, Timing};
use super::{InstructionPath, Kernels, kernels};
use crate::{Dtype, NumericsClass, WeightFormat};

/// Row counts that are told apart: one row, which is bound by reading weights; the rest of one block of rows; and more,
/// which soon is bound by arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Regime {
    One,
    Few,
    Many,
}

impl Regime {
    pub(crate) const ALL: [Self; 3] = [Self::One, Self::Few, Self::Many];

    const fn of(rows: usize) -> Self {
        match rows {
            0 | 1 => Self::One,
            2..=ROWS => Self::Few,
            _ => Self::Many,
        }
    }

    /// The number of rows that stands for the regime in the measurement: whole blocks, and for many enough of them that
    /// what is done once per panel counts as little as in a prefill.
    pub(super) const fn measured_rows(self) -> usize {
        match self {
            Self::One => 1,
            Self::Few => ROWS / 2,
            Self::Many => 8 * ROWS,
        }
    }
}

/// The paths by which a pool computes a class, by the number of rows that an expert or a matrix is given. The bits do
/// not depend on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathChoice([InstructionPath; 3]);

impl PathChoice {
    /// One path for everything.
    pub const fn only(path: InstructionPath) -> Self {
        Self([path; 3])
    }

    /// The choice that was measured on this machine: once in the life of a process, when it is first asked for.
    pub fn measured(class: impl Into<NumericsClass>) -> Self {
        static MEASURED: [OnceLock<PathChoice>; CLASSES] = [const { OnceLock::new() }; CLASSES];
        let class = class.into();
        *MEASURED[class.index()].get_or_init(|| choose(&Timing::new(class).measure(right_paths(class))))
    }

    /// The choice that is in use: as [`measured`](Self::measured), and for one row the path that read a model's weights
    /// the fastest when they last took turns at work.
    pub(crate) fn now(class: NumericsClass) -> Self {
        let Self([one, few, many]) = Self::measured(class);
        let winner = contest(class).winner().and_then(|winner| right_paths(class).get(winner));
        Self([winner.map_or(one, |(path, _)| *path), few, many])
    }

    /// The path for so many rows.
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
        write!(f, "{one} (1 row), {few} (2 to {ROWS}), {many} (more)")
    }
}

const CLASSES: usize = NumericsClass::ALL.len();

/// A path that computes a panel, and what is to be told of how long it took.
pub(crate) struct Computing {
    pub(crate) path: InstructionPath,
    timed: Option<(&'static Contest, TimedPanel)>,
}

impl Computing {
    /// Always the same path.
    pub(crate) const fn only(path: InstructionPath) -> Self {
        Self { path, timed: None }
    }

    /// The path for a panel of `bytes` of weights and so many rows: of one row, that which reads a model's weights the
    /// fastest.
    pub(crate) fn of(class: NumericsClass, rows: usize, bytes: u64) -> Self {
        let in_turn = match Regime::of(rows) {
            Regime::One => Self::in_turn(contest(class), right_paths(class), bytes),
            Regime::Few | Regime::Many => None,
        };
        in_turn.unwrap_or_else(|| Self::only(PathChoice::measured(class).of_rows(rows)))
    }

    /// Returns the path that a contest of these paths deals; `None` if it neither deals a turn nor has a winner.
    fn in_turn(contest: &'static Contest, paths: &[Compiled], bytes: u64) -> Option<Self> {
        let (entrant, timed) = match contest.deal(paths.len(), bytes, Instant::now) {
            PanelTurn::Timed(entry) => (entry.entrant, Some((contest, entry))),
            PanelTurn::Untimed(entrant) | PanelTurn::Won(entrant) => (entrant, None),
            PanelTurn::Unknown => return None,
        };
        paths.get(entrant).map(|(path, _)| Self { path: *path, timed })
    }

    /// The panel has been computed.
    pub(crate) fn end(self) {
        if let Some((contest, entry)) = self.timed {
            contest.end(&entry, Instant::now());
        }
    }
}

/// The contest of the paths of a class, in this process.
fn contest(class: NumericsClass) -> &'static Contest {
    static CONTESTS: [Contest; CLASSES] = [const { Contest::new() }; CLASSES];
    &CONTESTS[class.index()]
}

/// A path's kernels for one class.
pub(super) type Compiled = (InstructionPath, Kernels);

/// Times of a path, by [`Regime`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Measurement {
    pub(super) path: InstructionPath,
    pub(super) times: [Duration; 3],
}

/// The fastest path of each regime; of equals, the one that comes first. The portable path where nothing was measured.
fn choose(measurements: &[Measurement]) -> PathChoice {
    PathChoice(Regime::ALL.map(|regime| {
        let fastest = measurements.iter().min_by_key(|measurement| measurement.times[regime as usize]);
        fastest.map_or(InstructionPath::Portable, |measurement| measurement.path)
    }))
}

/// The path that a path's kernels for a class belong to.
const fn owner(path: InstructionPath, class: NumericsClass) -> InstructionPath {
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

/// The vector paths that this CPU has, with kernels of their own. The portable path is not among them: it is what is
/// left where there is nothing else.
fn candidates(class: NumericsClass) -> Vec<Compiled> {
    let is_candidate =
        |path: &InstructionPath| *path != InstructionPath::Portable && owner(*path, class) == *path;
    let paths = InstructionPath::available().into_iter().filter(is_candidate);
    paths.map(|path| (path, kernels(path, class))).collect()
}

/// Candidates that give the bits of the portable path.
fn passing(class: NumericsClass, candidates: Vec<Compiled>) -> Vec<Compiled> {
    if candidates.is_empty() {
        return candidates;
    }
    let reference = Reference::new(class);
    candidates.into_iter().filter(|candidate| reference.agrees(*candidate)).collect()
}

/// The candidates that passed, tried once per process.
fn right_paths(class: NumericsClass) -> &'static [Compiled] {
    static RIGHT: [OnceLock<Vec<Compiled>>; CLASSES] = [const { OnceLock::new() }; CLASSES];
    RIGHT[class.index()].get_or_init(|| passing(class, candidates(class)))
}

/// Does the path, which this CPU has, give the right bits for a class?
pub(crate) fn is_right(path: InstructionPath, class: NumericsClass) -> bool {
    path == InstructionPath::Portable
        || right_paths(class).iter().any(|(right, _)| *right == owner(path, class))
}

/// Paths that this CPU has and that do not give the right bits of one of `classes` on it: they are never used. Empty on
/// a sound machine.
pub fn wrong_paths(classes: &[NumericsClass]) -> Vec<(InstructionPath, NumericsClass)> {
    let with_classes = InstructionPath::available()
        .into_iter()
        .flat_map(|path| classes.iter().map(move |class| (path, *class)));
    with_classes.filter(|(path, class)| !is_right(*path, *class)).collect()
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
    fn the_fastest_is_chosen_whatever_its_name() {
        use InstructionPath::{Avx2Fma, Avx512Bf16, Avx512F, Portable};
        // Half the rate of fused multiply-adds, then twice.
        let xeon = [measured(Avx512Bf16, [9, 30, 290]), measured(Avx512F, [10, 28, 170])];
        assert_eq!(choose(&xeon), PathChoice([Avx512Bf16, Avx512F, Avx512F]));
        let zen = [measured(Avx512Bf16, [9, 14, 100]), measured(Avx512F, [9, 28, 200])];
        assert_eq!(choose(&zen), PathChoice::only(Avx512Bf16));
        assert_eq!(
            choose(&[measured(Avx512F, [2, 2, 2]), measured(Avx2Fma, [1, 2, 3])]).0,
            [Avx2Fma, Avx512F, Avx512F]
        );
        assert_eq!(choose(&[]), PathChoice::only(Portable));
    }

    proptest! {
        #[test]
        fn the_choice_is_the_minimum_of_what_was_measured(times in prop::collection::vec(any::<[u64; 3]>(), 1..=3)) {
            let measurements: Vec<Measurement> =
                VECTORS.into_iter().zip(&times).map(|(path, times)| measured(path, *times)).collect();
            let choice = choose(&measurements);
            for (rows, regime) in [(0, 0), (1, 0), (2, 1), (6, 1), (7, 2), (256, 2)] {
                let of = |path| measurements.iter().find(|m| m.path == path).map(|m| m.times[regime]);
                let least = measurements.iter().map(|m| m.times[regime]).min();
                prop_assert_eq!(of(choice.of_rows(rows)), least);
            }
        }
    }

    /// The portable kernel with one bit of the last result wrong.
    ///
    /// # Safety
    /// As for the kernels.
    unsafe fn one_bit_off<const DOWN: bool>(panel: &Panel) {
        let right = kernels(InstructionPath::Portable, BF16);
        // SAFETY: the caller's promise; the last column of the last row is there.
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

    /// Wrong only where there is more than one block of rows: the first column is the second one's.
    ///
    /// # Safety
    /// As for the kernels.
    unsafe fn wrong_for_many(panel: &Panel) {
        let right = kernels(InstructionPath::Portable, BF16);
        // SAFETY: the caller's promise.
        unsafe {
            (right.down)(panel);
            if panel.row_count > ROWS {
                panel.out.copy_from(panel.out.add(2), 2);
            }
        }
    }

    #[test]
    fn a_wrong_path_is_not_used() {
        let right = kernels(InstructionPath::Portable, BF16);
        let faults: [Kernels; 3] = [
            Kernels { down: one_bit_off::<true>, ..right },
            Kernels { gate_up: one_bit_off::<false>, ..right },
            Kernels { down: wrong_for_many, ..right },
        ];
        for wrong in faults {
            // The wrong one would be the fastest by far.
            let time =
                |(path, _): &Compiled| measured(*path, if *path == VECTORS[0] { [1; 3] } else { [9; 3] });
            let chosen = |candidates: Vec<Compiled>| {
                let passing = passing(BF16, candidates);
                choose(&passing.iter().map(time).collect::<Vec<_>>())
            };
            let next = chosen(vec![(VECTORS[0], wrong), (VECTORS[1], right)]);
            assert_eq!(next, PathChoice::only(VECTORS[1]));
            assert_eq!(chosen(vec![(VECTORS[0], wrong)]), PathChoice::only(InstructionPath::Portable));
            assert_eq!(chosen(vec![(VECTORS[0], right)]), PathChoice::only(VECTORS[0]));
        }
    }

    #[test]
    fn available_instruction_paths_agree_and_one_is_chosen() {
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
    fn one_row_is_computed_by_the_path_that_wins_at_work() {
        static CONTEST: Contest = Contest::new();
        let right = kernels(InstructionPath::Portable, BF16);
        let paths = VECTORS.map(|path| (path, right));
        let mut counts = [0; 3];
        let computing = loop {
            let computing = Computing::in_turn(&CONTEST, &paths, 1 << 20).unwrap();
            let place = VECTORS.iter().position(|path| *path == computing.path).unwrap();
            counts[place] += 1;
            if CONTEST.winner().is_some() {
                break computing;
            }
            // The second one is the fastest.
            std::thread::sleep(Duration::from_micros(if place == 1 { 50 } else { 1000 }));
            computing.end();
        };
        assert!(counts.iter().all(|count| *count > 32), "{counts:?}");
        assert_eq!(computing.path, VECTORS[1]);
        assert!(computing.timed.is_none());
    }

    #[test]
    fn several_rows_and_paths_that_are_told_take_part_in_no_contest() {
        for rows in [2, 6, 7, 300] {
            let computing = Computing::of(BF16, rows, 1 << 20);
            assert_eq!(computing.path, PathChoice::measured(BF16).of_rows(rows));
            assert!(computing.timed.is_none());
        }
    }

    #[test]
    fn choices_are_readable() {
        let mixed = PathChoice([VECTORS[0], VECTORS[1], VECTORS[1]]);
        assert_eq!(mixed.to_string(), "avx512-bf16 (1 row), avx512f (2 to 6), avx512f (more)");
        assert_eq!(PathChoice::only(VECTORS[2]).to_string(), "avx2-fma");
    }
}
