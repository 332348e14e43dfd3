//! The shape of an expert and everything that follows from it: panels, strides, sizes.

use crate::memory::Buffer;
use crate::quantise::{self, GROUP, RowGroup};
use crate::{Activation, Dtype, KernelError, Matrix, NumericsClass, WeightFormat};

/// Largest legal `hidden` or `width`. Shapes come from files, so there is a limit; real ones are below 2^16.
pub const MAX_DIMENSION: usize = 1 << 18;

/// Output columns of a panel, the unit in which weights are packed and work is split.
pub(crate) const PANEL: usize = 64;

/// Intermediate columns that one gate-and-up panel produces: half of it is gate, half is up. They are one group of the
/// down projection where weights are quantised; a panel without gate columns produces two of them.
pub(crate) const HALF: usize = PANEL / 2;
const _: () = assert!(HALF == GROUP);

/// Neighbouring columns of a panel that have the same scales where weights are fp8.
pub(crate) const SCALE_COLUMNS: usize = 4;

/// One expert: `out = (act(x Gate^T) * (x Up^T)) Down^T`, or `out = act(x Up^T) Down^T` where it has no gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertShape {
    hidden: usize,
    width: usize,
    dtype: Dtype,
    weights: WeightFormat,
    activation: Activation,
    gated: bool,
    biases: Biases,
}

/// Which projections have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Biases {
    None,
    /// Biases of the projections whose sums are activated or gated.
    Inner,
    All,
}

impl ExpertShape {
    /// `hidden`: elements of an input and of an output row; `width`: elements between the projections. Any size is
    /// legal, odd ones included. A `class` is a [`Dtype`] where weights are not quantised.
    ///
    /// # Errors
    /// [`KernelError::Dimension`] for 0 and above [`MAX_DIMENSION`]; [`KernelError::TooLarge`] where the packed form
    /// exceeds the address space.
    pub fn new(
        hidden: usize,
        width: usize,
        class: impl Into<NumericsClass>,
        activation: Activation,
    ) -> Result<Self, KernelError> {
        let NumericsClass { dtype, weights } = class.into();
        for (what, value) in [("hidden", hidden), ("width", width)] {
            if value == 0 || value > MAX_DIMENSION {
                return Err(KernelError::Dimension { what, value, max: MAX_DIMENSION });
            }
        }
        // Stored bytes, packed bytes and their padding all stay below 16 bytes per element of three matrices padded to
        // panels.
        let padded = |n: usize| n.div_ceil(PANEL).checked_mul(PANEL);
        let fits = padded(hidden)
            .zip(padded(width))
            .and_then(|(h, w)| h.checked_mul(w))
            .and_then(|elements| elements.checked_mul(3 * 16))
            .is_some_and(|bytes| bytes <= isize::MAX as usize);
        if !fits {
            return Err(KernelError::TooLarge { what: "an expert" });
        }
        Ok(Self { hidden, width, dtype, weights, activation, gated: true, biases: Biases::None })
    }

    /// Returns this shape without a gate projection: what the activation gives goes to the down projection as it is.
    #[must_use]
    pub const fn without_gate(self) -> Self {
        Self { gated: false, ..self }
    }

    /// Returns this shape with a bias on each projection.
    #[must_use]
    pub const fn with_biases(self) -> Self {
        Self { biases: Biases::All, ..self }
    }

    /// Returns this shape with a bias on each projection but the down projection.
    #[must_use]
    pub const fn with_inner_biases(self) -> Self {
        Self { biases: Biases::Inner, ..self }
    }

    /// Reports if there is a gate projection.
    pub const fn gated(&self) -> bool {
        self.gated
    }

    /// Reports if the projection has a bias.
    pub const fn has_biases(&self, matrix: Matrix) -> bool {
        match (matrix, self.biases) {
            (_, Biases::None) | (Matrix::Down, Biases::Inner) => false,
            (Matrix::Gate, _) => self.gated,
            (Matrix::Up | Matrix::Down, _) => true,
        }
    }

    /// Elements of an input row and of an output row.
    pub const fn hidden(&self) -> usize {
        self.hidden
    }

    /// Elements between the projections.
    pub const fn width(&self) -> usize {
        self.width
    }

    /// Element type of weights, inputs and outputs.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The function applied to the gate projection, or to the up projection where there is no gate.
    pub const fn activation(&self) -> Activation {
        self.activation
    }

    /// Bytes of one input or output row.
    pub const fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.bytes()
    }

    /// Rows and elements per row of a weight matrix as it is stored.
    pub const fn matrix(&self, matrix: Matrix) -> (usize, usize) {
        match matrix {
            Matrix::Gate if !self.gated => (0, self.hidden),
            Matrix::Gate | Matrix::Up => (self.width, self.hidden),
            Matrix::Down => (self.hidden, self.width),
        }
    }

    /// Bytes of memory that the packed expert takes, padding and page rounding included: what to check against a limit
    /// before reading.
    pub const fn packed_bytes(&self) -> usize {
        Buffer::resident_bytes(self.packed_words() * 4) + self.bias_elements() * size_of::<f32>()
    }

    /// Bytes of a pool's scratch memory that each row of a call takes. A pool keeps what its largest call needed.
    pub const fn scratch_bytes_per_row(&self) -> usize {
        self.hidden_stride() + self.input_copy_bytes() + 2 * size_of::<*const u8>()
    }

    /// Elements of the biases, those of columns that panels are padded with included.
    pub(crate) const fn bias_elements(&self) -> usize {
        match self.biases {
            Biases::None => 0,
            Biases::Inner => self.gate_up_panels() * PANEL,
            Biases::All => (self.gate_up_panels() + self.down_panels()) * PANEL,
        }
    }

    /// Returns the numerics class, which decides the bits of results.
    pub const fn class(&self) -> NumericsClass {
        NumericsClass { dtype: self.dtype, weights: self.weights }
    }

    /// Intermediate columns that a panel of the first phase produces, and columns of its matrices that it holds.
    pub(crate) const fn gate_up_columns(&self) -> usize {
        if self.gated { HALF } else { PANEL }
    }

    /// Panels of the gate and up projections.
    pub(crate) const fn gate_up_panels(&self) -> usize {
        self.width.div_ceil(self.gate_up_columns())
    }

    /// Panels of the down projection.
    pub(crate) const fn down_panels(&self) -> usize {
        self.hidden.div_ceil(PANEL)
    }

    /// Steps in which the gate and up projections sum over input elements.
    pub(crate) const fn gate_up_steps(&self) -> usize {
        steps(self.hidden, self.weights)
    }

    /// Steps in which the down projection sums over intermediate elements.
    pub(crate) const fn down_steps(&self) -> usize {
        steps(self.width, self.weights)
    }

    pub(crate) const fn gate_up_panel_words(&self) -> usize {
        self.gate_up_steps() * step_words(self.dtype, self.weights)
    }

    pub(crate) const fn down_panel_words(&self) -> usize {
        self.down_steps() * step_words(self.dtype, self.weights)
    }

    /// Where the down panels begin.
    pub(crate) const fn down_offset_words(&self) -> usize {
        self.gate_up_panels() * self.gate_up_panel_words()
    }

    pub(crate) const fn packed_words(&self) -> usize {
        self.down_offset_words() + self.down_panels() * self.down_panel_words()
    }

    /// Bytes of what one gate-and-up panel produces of a row.
    pub(crate) const fn gate_up_bytes(&self) -> usize {
        let columns = self.gate_up_columns();
        match self.weights {
            WeightFormat::Plain | WeightFormat::Fp8 => columns * self.dtype.bytes(),
            WeightFormat::Int8 | WeightFormat::Int4 | WeightFormat::Mxfp4 => {
                columns / GROUP * size_of::<RowGroup>()
            }
        }
    }

    /// Bytes between rows of intermediate values: what whole panels produce, so that a panel's store never needs a mask
    /// and rows stay aligned.
    pub(crate) const fn hidden_stride(&self) -> usize {
        (self.gate_up_panels() * self.gate_up_bytes()).next_multiple_of(64)
    }

    /// Bytes of an input row's copy where one is made, else 0.
    pub(crate) const fn input_copy_bytes(&self) -> usize {
        row_copy_bytes(self.hidden, self.class())
    }
}

/// Bytes of the copy of a row of `elements` that kernels read instead of it: one with zeros appended where they are no
/// whole steps, or one of integers where weights are quantised. 0 where they read the row itself.
pub(crate) const fn row_copy_bytes(elements: usize, class: NumericsClass) -> usize {
    match class.weights {
        WeightFormat::Plain if elements.is_multiple_of(2) => 0,
        WeightFormat::Plain => ((elements + 1) * class.dtype.bytes()).next_multiple_of(64),
        WeightFormat::Fp8 if elements.is_multiple_of(GROUP) => 0,
        WeightFormat::Fp8 => (elements.next_multiple_of(GROUP) * class.dtype.bytes()).next_multiple_of(64),
        WeightFormat::Int8 | WeightFormat::Int4 | WeightFormat::Mxfp4 => quantise::row_bytes(elements),
    }
}

/// Steps in which `elements` of K are summed: pairs, or groups where weights are quantised or fp8.
pub(crate) const fn steps(elements: usize, weights: WeightFormat) -> usize {
    match weights {
        WeightFormat::Plain => elements.div_ceil(2),
        WeightFormat::Int8 | WeightFormat::Int4 | WeightFormat::Mxfp4 | WeightFormat::Fp8 => {
            elements.div_ceil(GROUP)
        }
    }
}

/// 32-bit words in which one step of 64 columns is packed.
pub(crate) const fn step_words(dtype: Dtype, weights: WeightFormat) -> usize {
    let scales = PANEL / 2;
    match (weights, dtype) {
        (WeightFormat::Plain, Dtype::Bf16) => PANEL,
        (WeightFormat::Plain, Dtype::F32) => 2 * PANEL,
        (WeightFormat::Int8, _) => PANEL * GROUP / 4 + scales,
        (WeightFormat::Int4 | WeightFormat::Mxfp4, _) => PANEL * GROUP / 8 + scales,
        (WeightFormat::Fp8, _) => PANEL * GROUP / 4 + PANEL / SCALE_COLUMNS,
    }
}
