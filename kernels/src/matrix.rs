//! Weight matrices in panels, outside of experts.

use crate::memory::Buffer;
use crate::pack::Panels;
use crate::shape::{PANEL, row_copy_bytes, step_words, steps};
use crate::{Dtype, KernelError, MAX_DIMENSION, NumericsClass, StoredDtype};

/// Largest legal number of outputs; vocabularies are the largest there are.
pub const MAX_OUTPUTS: usize = 1 << 20;

/// A weight matrix `[outputs, inputs]` in the order in which the kernels read it, laid out like an expert's down projection. Never changes; share it freely between threads.
#[derive(Debug)]
pub struct PackedMatrix {
    outputs: usize,
    inputs: usize,
    class: NumericsClass,
    buffer: Buffer,
}

impl PackedMatrix {
    /// Packs matrices of the same number of `inputs`, one below the other: products with all of them are one product then. `parts` are row-major and little-endian as checkpoints store them, with any alignment. Weights become what `class`, or a [`Dtype`], calls for.
    ///
    /// # Errors
    /// [`KernelError::Dimension`] for 0 and above [`MAX_OUTPUTS`] or [`MAX_DIMENSION`], [`KernelError::WeightLength`] for a part that is not whole rows, [`KernelError::OutOfMemory`].
    pub fn pack(
        inputs: usize,
        class: impl Into<NumericsClass>,
        parts: &[(StoredDtype, &[u8])],
    ) -> Result<Self, KernelError> {
        let class = class.into();
        let within = |what, value, max| match value {
            0 => Err(KernelError::Dimension { what, value, max }),
            _ if value > max => Err(KernelError::Dimension { what, value, max }),
            _ => Ok(()),
        };
        within("inputs", inputs, MAX_DIMENSION)?;
        let mut outputs = 0;
        for (stored, weights) in parts {
            let row_bytes = inputs * stored.bytes();
            if !weights.len().is_multiple_of(row_bytes) {
                return Err(KernelError::WeightLength { actual: weights.len(), row_bytes });
            }
            outputs += weights.len() / row_bytes;
        }
        within("outputs", outputs, MAX_OUTPUTS)?;
        let panel_words = steps(inputs, class.weights) * step_words(class.dtype, class.weights);
        let mut buffer = Buffer::zeroed(outputs.div_ceil(PANEL) * panel_words * 4)?;
        let panels = Panels { panel_words, columns: PANEL, shift: 0 };
        let mut first_row = 0;
        for (stored, weights) in parts {
            let row_bytes = inputs * stored.bytes();
            panels.write(buffer.words_mut(), *stored, class, first_row, row_bytes, weights);
            first_row += weights.len() / row_bytes;
        }
        Ok(Self { outputs, inputs, class, buffer })
    }

    /// Elements of a result's row.
    pub const fn outputs(&self) -> usize {
        self.outputs
    }

    /// Elements of an input row.
    pub const fn inputs(&self) -> usize {
        self.inputs
    }

    /// Element type of inputs and results.
    pub const fn dtype(&self) -> Dtype {
        self.class.dtype
    }

    /// What decides the bits of results.
    pub const fn class(&self) -> NumericsClass {
        self.class
    }

    /// Bytes of an input row.
    pub const fn input_bytes(&self) -> usize {
        self.inputs * self.class.dtype.bytes()
    }

    /// Bytes of a result's row.
    pub const fn output_bytes(&self) -> usize {
        self.outputs * self.class.dtype.bytes()
    }

    /// Bytes of memory that the weights take.
    pub fn bytes(&self) -> usize {
        Buffer::resident_bytes(self.buffer.len())
    }

    pub(crate) const fn input_copy_bytes(&self) -> usize {
        row_copy_bytes(self.inputs, self.class)
    }

    pub(crate) const fn steps(&self) -> usize {
        steps(self.inputs, self.class.weights)
    }

    pub(crate) const fn panel_words(&self) -> usize {
        self.steps() * step_words(self.class.dtype, self.class.weights)
    }

    /// The first panel; the others follow.
    pub(crate) fn words(&self) -> *const u32 {
        self.buffer.as_ptr().cast()
    }
}
