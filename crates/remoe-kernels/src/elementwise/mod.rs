//! Element-wise operations on rows (norms, rotary embeddings, sums), with the widest vectors of the processor.

use crate::elements;
use crate::vectors::{VectorisedWork, run_vectorised};
use crate::{Dtype, KernelError, Pool};

/// Elements that a thread processes at a time: enough to outweigh handing them over.
const ELEMENTS_PER_PART: usize = 1 << 14;

/// An operation on rows of elements. Each row's result depends on no other row.
#[derive(Clone, Copy, Debug)]
pub enum RowOperation<'a> {
    /// Overwrites the rows with the normalised rows of `from`, which has the same size.
    Norm {
        /// Rows to normalise.
        from: &'a [u8],
        /// Normalisation of each part of a row, as long as its weights: a whole row, or one head of it.
        norm: Norm<'a>,
    },
    /// Adds one row to every row.
    AddRow(&'a [f32]),
    /// Adds rows of the same size.
    AddRows(&'a [u8]),
    /// Clamps elements to `-bound ..= bound`.
    Clamp(f32),
    /// Multiplies all elements.
    Scale(f32),
    /// Multiplies the elements of each row by the row's factor.
    ScaleRows(&'a [f32]),
    /// Applies a rotary position embedding to the last elements of each head.
    Rotate(Rotation<'a>),
}

/// A normalisation and its weights.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// Formula of the normalisation.
    pub form: NormForm,
    /// Factors of the normalised elements.
    pub weight: &'a [f32],
    /// Terms that are added last, as many as weights. Only [`NormForm::Layer`] reads them.
    pub bias: &'a [f32],
    /// Term added to the mean square before the square root is taken.
    pub epsilon: f32,
}

/// The formula of a normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormForm {
    /// Division by the root mean square. The quotient is rounded to the rows' type before it is multiplied by the weight.
    Rms,
    /// Division by the root mean square, all in float32.
    RmsInFloat32,
    /// Subtraction of the mean and division by the standard deviation, in float32.
    Layer,
}

/// A rotary position embedding (RoPE; Su et al., arXiv 2104.09864) of all heads of each row.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a> {
    /// Cosines, `[rows][half]`.
    pub cos: &'a [f32],
    /// Sines, `[rows][half]`.
    pub sin: &'a [f32],
    /// Number of rotated pairs: the last `2 * half` elements of a head are rotated.
    pub half: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Pairs are neighbours; otherwise they are `half` elements apart.
    pub is_interleaved: bool,
    /// Type to which products are rounded before they are added.
    pub dtype: Dtype,
}

impl RowOperation<'_> {
    /// Checks the operands' lengths for `rows` rows of `width` elements.
    fn validate(&self, dtype: Dtype, rows: usize, width: usize) -> Result<(), KernelError> {
        let expect = |what, actual, expected| match actual == expected {
            true => Ok(()),
            false => Err(KernelError::Length { what, actual, expected }),
        };
        let divides = |what, value: usize| match value > 0 && width.is_multiple_of(value) {
            true => Ok(()),
            false => Err(KernelError::Dimension { what, value, max: width }),
        };
        let bytes = rows * width * dtype.bytes();
        match *self {
            Self::Norm { from, norm } => {
                expect("rows to normalise", from.len(), bytes)?;
                divides("weights of a norm", norm.weight.len())?;
                match norm.form {
                    NormForm::Layer => expect("terms of a norm", norm.bias.len(), norm.weight.len()),
                    NormForm::Rms | NormForm::RmsInFloat32 => Ok(()),
                }
            }
            Self::AddRow(row) => expect("row to add", row.len(), width),
            Self::AddRows(from) => expect("rows to add", from.len(), bytes),
            Self::Clamp(_) | Self::Scale(_) => Ok(()),
            Self::ScaleRows(factors) => expect("factors of rows", factors.len(), rows),
            Self::Rotate(rotation) => {
                divides("elements of a head", rotation.head_dim)?;
                if rotation.half > rotation.head_dim / 2 {
                    let (value, max) = (rotation.half, rotation.head_dim / 2);
                    return Err(KernelError::Dimension { what: "rotated pairs", value, max });
                }
                expect("cosines", rotation.cos.len(), rows * rotation.half)?;
                expect("sines", rotation.sin.len(), rows * rotation.half)
            }
        }
    }
}

impl Pool {
    /// Applies `operation` to `rows`, which have `width` elements of `dtype` each. Many rows are spread over the threads.
    ///
    /// # Errors
    /// [`KernelError::WeightLength`] if `rows` is not a whole number of rows, [`KernelError::Length`] and
    /// [`KernelError::Dimension`] if an operand does not fit the rows, [`KernelError::Panicked`].
    pub fn apply(
        &self,
        operation: &RowOperation<'_>,
        dtype: Dtype,
        width: usize,
        rows: &mut [u8],
    ) -> Result<(), KernelError> {
        let row_bytes = width * dtype.bytes();
        if rows.is_empty() {
            return Ok(());
        }
        if row_bytes == 0 || !rows.len().is_multiple_of(row_bytes) {
            return Err(KernelError::WeightLength { actual: rows.len(), row_bytes });
        }
        operation.validate(dtype, rows.len() / row_bytes, width)?;
        let part_rows = (ELEMENTS_PER_PART / width).max(1);
        let apply =
            |first: usize, rows: &mut [u8]| run_vectorised(RowRange { operation, dtype, width, first, rows });
        if rows.len() <= part_rows * row_bytes || self.threads() == 1 {
            apply(0, rows);
            return Ok(());
        }
        let parts = rows.chunks_mut(part_rows * row_bytes);
        let mut parts: Vec<(usize, &mut [u8])> = (0..).step_by(part_rows).zip(parts).collect();
        self.each(&mut parts, |(first, rows)| apply(*first, rows))
    }
}

/// Widens a row of `dtype` elements to float32.
pub fn widen(dtype: Dtype, from: &[u8], to: &mut [f32]) {
    run_vectorised(Widen { dtype, from, to });
}

/// Rounds a row of float32 to `dtype` elements and writes it.
pub fn narrow(dtype: Dtype, from: &[f32], to: &mut [u8]) {
    run_vectorised(Narrow { dtype, from, to });
}

struct Widen<'a> {
    dtype: Dtype,
    from: &'a [u8],
    to: &'a mut [f32],
}

impl VectorisedWork for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        elements::widen(self.dtype, self.from, self.to);
    }
}

struct Narrow<'a> {
    dtype: Dtype,
    from: &'a [f32],
    to: &'a mut [u8],
}

impl VectorisedWork for Narrow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        elements::narrow(self.dtype, self.from, self.to);
    }
}

/// Consecutive rows that one thread processes. `first` is the number of the first one among all rows.
struct RowRange<'a> {
    operation: &'a RowOperation<'a>,
    dtype: Dtype,
    width: usize,
    first: usize,
    rows: &'a mut [u8],
}

/// Widens each row of a [`RowRange`], changes it and writes it back. A macro, because the compiler would compile a large
/// closure separately, without the caller's target features.
macro_rules! change_rows {
    ($part:ident, |$index:pat_param, $row:ident| $change:expr) => {{
        let mut elements = vec![0.0; $part.width];
        let row_bytes = $part.width * $part.dtype.bytes();
        for ($index, bytes) in ($part.first..).zip($part.rows.chunks_exact_mut(row_bytes)) {
            elements::widen($part.dtype, bytes, &mut elements);
            let $row = &mut elements[..];
            $change;
            elements::narrow($part.dtype, $row, bytes);
        }
    }};
}

impl VectorisedWork for RowRange<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let part = self;
        match *part.operation {
            RowOperation::Norm { from, norm } => part.norm(from, &norm),
            RowOperation::AddRow(terms) => change_rows!(part, |_, row| elements::add(row, terms)),
            RowOperation::AddRows(from) => part.add_rows(from),
            RowOperation::Clamp(bound) => change_rows!(part, |_, row| elements::clamp(row, bound)),
            RowOperation::Scale(factor) => change_rows!(part, |_, row| elements::scale(row, factor)),
            RowOperation::ScaleRows(factors) => {
                change_rows!(part, |index, row| elements::scale(row, factors[index]));
            }
            RowOperation::Rotate(rotation) => match rotation.dtype {
                Dtype::F32 => part.rotate::<false>(&rotation),
                Dtype::Bf16 => part.rotate::<true>(&rotation),
            },
        }
    }
}

impl RowRange<'_> {
    #[inline(always)]
    fn norm(self, from: &[u8], norm: &Norm<'_>) {
        let row_bytes = self.width * self.dtype.bytes();
        let mut row = vec![0.0; self.width];
        let from = from.chunks_exact(row_bytes).skip(self.first);
        for (from, to) in from.zip(self.rows.chunks_exact_mut(row_bytes)) {
            elements::widen(self.dtype, from, &mut row);
            for part in row.chunks_exact_mut(norm.weight.len()) {
                match (norm.form, self.dtype) {
                    (NormForm::Layer, _) => elements::layer_norm(part, norm.weight, norm.bias, norm.epsilon),
                    (NormForm::Rms, Dtype::Bf16) => {
                        elements::rms_norm::<true>(part, norm.weight, norm.epsilon)
                    }
                    _ => elements::rms_norm::<false>(part, norm.weight, norm.epsilon),
                }
            }
            elements::narrow(self.dtype, &row, to);
        }
    }

    #[inline(always)]
    fn add_rows(self, from: &[u8]) {
        let row_bytes = self.width * self.dtype.bytes();
        let from = &from[self.first * row_bytes..][..self.rows.len()];
        elements::add_rows(self.dtype, self.rows, from);
    }

    #[inline(always)]
    fn rotate<const BF16: bool>(self, rotation: &Rotation<'_>) {
        let part = self;
        let Rotation { cos, sin, half, head_dim, .. } = *rotation;
        change_rows!(part, |index, row| {
            let (cos, sin) = (&cos[index * half..][..half], &sin[index * half..][..half]);
            for head in row.chunks_exact_mut(head_dim) {
                let rotated = &mut head[head_dim - 2 * half..];
                match rotation.is_interleaved {
                    false => elements::rotate_halves::<BF16>(rotated, cos, sin),
                    true => elements::rotate_pairs::<BF16>(rotated, cos, sin),
                }
            }
        });
    }
}
