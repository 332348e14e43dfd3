//! The shape of an expert, and the panels, strides and sizes that follow from it.

use crate::memory::Buffer;
use crate::quantise::{self, GROUP, RowGroup};
use crate::{Activation, Dtype, ExpertMatrix, KernelError, NumericsClass, WeightFormat};

/// Largest legal `hidden` or `width`. Shapes are read from files, so they need a limit; real ones are below 2^16.
pub const MAX_DIMENSION: usize = 1 << 18;

/// Output columns of a panel. Weights are packed and work is split in panels.
pub(crate) const PANEL: usize = 64;

/// Intermediate columns that a panel of gate and up columns produces: half of the panel is gate, half is up. With
/// quantised weights they are one group of the down projection. A panel without gate columns produces two groups.
pub(crate) const HALF_PANEL: usize = PANEL / 2;
const _: () = assert!(HALF_PANEL == GROUP);

/// Neighbouring columns of a panel that share an fp8 scale.
pub(crate) const SCALE_COLUMNS: usize = 4;

/// Shape of an expert that computes `out = (act(x Gate^T) * (x Up^T)) Down^T`, or `out = act(x Up^T) Down^T` without a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertShape {
    hidden: usize,
    width: usize,
    dtype: Dtype,
    weights: WeightFormat,
    activation: Activation,
    has_gate: bool,
    biases: BiasedProjections,
}

/// Projections that have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum BiasedProjections {
    None,
    /// All but the down projection.
    Inner,
    All,
}

impl ExpertShape {
    /// Describes an expert with a gate and without biases. `hidden` is the size of input and output rows, `width` that
    /// of intermediate rows. Odd sizes are legal. A [`Dtype`] stands for the class of unquantised weights.
    ///
    /// # Errors
    /// [`KernelError::Dimension`] for 0 and above [`MAX_DIMENSION`]; [`KernelError::TooLarge`] if the packed form
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
        // Stored bytes, packed bytes and padding each take less than 16 bytes per element of three matrices that are
        // padded to whole panels.
        let padded = |n: usize| n.div_ceil(PANEL).checked_mul(PANEL);
        let fits = padded(hidden)
            .zip(padded(width))
            .and_then(|(h, w)| h.checked_mul(w))
            .and_then(|elements| elements.checked_mul(3 * 16))
            .is_some_and(|bytes| bytes <= isize::MAX as usize);
        if !fits {
            return Err(KernelError::TooLarge { what: "an expert" });
        }
        Ok(Self {
            hidden,
            width,
            dtype,
            weights,
            activation,
            has_gate: true,
            biases: BiasedProjections::None,
        })
    }

    /// Returns this shape without a gate projection: the activation of the up projection is the input of the down projection.
    #[must_use]
    pub const fn without_gate(self) -> Self {
        Self { has_gate: false, ..self }
    }

    /// Returns this shape with a bias on each projection.
    #[must_use]
    pub const fn with_biases(self) -> Self {
        Self { biases: BiasedProjections::All, ..self }
    }

    /// Returns this shape with a bias on each projection except the down projection.
    #[must_use]
    pub const fn with_inner_biases(self) -> Self {
        Self { biases: BiasedProjections::Inner, ..self }
    }

    /// Reports if there is a gate projection.
    pub const fn has_gate(&self) -> bool {
        self.has_gate
    }

    /// Reports if the projection has a bias.
    pub const fn has_biases(&self, matrix: ExpertMatrix) -> bool {
        match (matrix, self.biases) {
            (_, BiasedProjections::None) | (ExpertMatrix::Down, BiasedProjections::Inner) => false,
            (ExpertMatrix::Gate, _) => self.has_gate,
            (ExpertMatrix::Up | ExpertMatrix::Down, _) => true,
        }
    }

    /// Elements of an input row and of an output row: the model's hidden size.
    pub const fn hidden(&self) -> usize {
        self.hidden
    }

    /// Elements of an intermediate row: the expert's intermediate size.
    pub const fn width(&self) -> usize {
        self.width
    }

    /// Element type of weights, inputs and outputs.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the function applied to the gate projection, or to the up projection if there is no gate.
    pub const fn activation(&self) -> Activation {
        self.activation
    }

    /// Bytes of one input or output row.
    pub const fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.bytes()
    }

    /// Returns the rows and the elements per row of a weight matrix as it is stored in a checkpoint.
    pub const fn matrix(&self, matrix: ExpertMatrix) -> (usize, usize) {
        match matrix {
            ExpertMatrix::Gate if !self.has_gate => (0, self.hidden),
            ExpertMatrix::Gate | ExpertMatrix::Up => (self.width, self.hidden),
            ExpertMatrix::Down => (self.hidden, self.width),
        }
    }

    /// Bytes of memory that the packed expert takes, padding included. Callers check it against their limit before they
    /// read weights.
    pub const fn packed_bytes(&self) -> usize {
        Buffer::resident_bytes(self.packed_words() * 4) + self.bias_elements() * size_of::<f32>()
    }

    /// Bytes of scratch memory that each row of a call takes. A pool keeps the scratch memory of its largest call.
    pub const fn scratch_bytes_per_row(&self) -> usize {
        self.intermediate_stride() + self.input_copy_bytes() + 2 * size_of::<*const u8>()
    }

    /// Number of biases, including those of padding columns.
    pub(crate) const fn bias_elements(&self) -> usize {
        match self.biases {
            BiasedProjections::None => 0,
            BiasedProjections::Inner => self.gate_up_panels() * PANEL,
            BiasedProjections::All => (self.gate_up_panels() + self.down_panels()) * PANEL,
        }
    }

    /// Returns the numerics class, which decides the bits of results.
    pub const fn class(&self) -> NumericsClass {
        NumericsClass { dtype: self.dtype, weights: self.weights }
    }

    /// Intermediate columns that a panel of the first phase produces: as many as it holds columns of each projection.
    pub(crate) const fn gate_up_columns(&self) -> usize {
        if self.has_gate { HALF_PANEL } else { PANEL }
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

    /// Offset of the first down panel.
    pub(crate) const fn down_offset_words(&self) -> usize {
        self.gate_up_panels() * self.gate_up_panel_words()
    }

    pub(crate) const fn packed_words(&self) -> usize {
        self.down_offset_words() + self.down_panels() * self.down_panel_words()
    }

    /// Bytes that one panel of the first phase produces for a row.
    pub(crate) const fn gate_up_output_bytes(&self) -> usize {
        let columns = self.gate_up_columns();
        match self.weights {
            WeightFormat::Plain | WeightFormat::Fp8 => columns * self.dtype.bytes(),
            WeightFormat::Int8 | WeightFormat::Int4 | WeightFormat::Mxfp4 => {
                columns / GROUP * size_of::<RowGroup>()
            }
        }
    }

    /// Bytes between intermediate rows. Rows have room for whole panels, so that stores need no mask, and stay aligned.
    pub(crate) const fn intermediate_stride(&self) -> usize {
        (self.gate_up_panels() * self.gate_up_output_bytes()).next_multiple_of(64)
    }

    /// Bytes of the copy of an input row: see [`row_copy_bytes`].
    pub(crate) const fn input_copy_bytes(&self) -> usize {
        row_copy_bytes(self.hidden, self.class())
    }
}

/// Bytes of the copy of an input row of `elements` that kernels read, or 0 if they read the row itself. A row is copied
/// to append zeros up to a whole step, or to quantise it.
pub(crate) const fn row_copy_bytes(elements: usize, class: NumericsClass) -> usize {
    match class.weights {
        WeightFormat::Plain if elements.is_multiple_of(2) => 0,
        WeightFormat::Plain => ((elements + 1) * class.dtype.bytes()).next_multiple_of(64),
        WeightFormat::Fp8 if elements.is_multiple_of(GROUP) => 0,
        WeightFormat::Fp8 => (elements.next_multiple_of(GROUP) * class.dtype.bytes()).next_multiple_of(64),
        WeightFormat::Int8 | WeightFormat::Int4 | WeightFormat::Mxfp4 => quantise::row_bytes(elements),
    }
}

/// Number of steps in which `elements` of K are summed: pairs, or groups if weights are quantised or fp8.
pub(crate) const fn steps(elements: usize, weights: WeightFormat) -> usize {
    match weights {
        WeightFormat::Plain => elements.div_ceil(2),
        WeightFormat::Int8 | WeightFormat::Int4 | WeightFormat::Mxfp4 | WeightFormat::Fp8 => {
            elements.div_ceil(GROUP)
        }
    }
}

/// 32-bit words of one packed step of [`PANEL`] columns.
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
