//! CPU backend: tensor operations of [`remoe_kernels`], without another library.
//!
//! A row's result has the same bits for every batch size, number of threads and instruction set. The order of sums in
//! products and attention is documented in [`remoe_kernels`], element-wise operations in
//! [`remoe_kernels::elementwise`]. bfloat16 rounds where the reference implementation (Transformers) does: results of
//! products, a norm before its weights, cosines and sines, each product of a rotation, every sum.

mod embedding;
mod pages;
mod rows;
mod up_projections;

use crate::backend::{
    Affine, Backend, BackendError, DeferredWeights, LoadModelError, PAGE_POSITIONS, PagedLayer,
    RELEASED_PAGE, ResidentPart, RowSpan,
};
use crate::device::{DeviceError, DeviceName};
use embedding::NativeEmbedding;
use pages::{NativePages, PagePart};
use remoe_kernels::activations::exp;
use remoe_kernels::elementwise::{self, Norm, NormForm, Rotation, RowOperation};
use remoe_kernels::numerics::round_bf16;
use remoe_kernels::{
    AttentionShape, AttentionSpan, CacheFormat, Dtype, ExpertJob, KernelError, MatrixProduct, NumericsClass,
    PackedExpert, PackedMatrix, Pool,
};
use remoe_model::{Activation, Checkpoint, MlaFacts, MlpTensors, NormKind, RopeFacts, RopeLayout, TensorRef};
use remoe_weights::{load_floats, load_gated, load_matrix, stored_dtype};
use rows::{BufferPool, Rows};
use std::borrow::Cow;
use std::sync::Arc;
use up_projections::NativeUpProjections;

/// The CPU backend.
pub struct Native {
    pool: Arc<Pool>,
    dtype: Dtype,
    cache_format: CacheFormat,
    buffers: BufferPool,
}

/// Weights of a product, packed for the kernels, with an optional bias.
pub struct NativeLinear {
    matrix: Arc<PackedMatrix>,
    bias: Option<Vec<f32>>,
}

/// Weights of a norm.
pub struct NativeNorm {
    kind: NormKind,
    weight: Vec<f32>,
    /// Empty if the norm has no bias.
    bias: Vec<f32>,
    epsilon: f32,
}

impl ResidentPart for NativeLinear {
    fn bytes(&self) -> usize {
        self.matrix.bytes() + self.bias.as_ref().map_or(0, |bias| size_of_val(&bias[..]))
    }
}

impl ResidentPart for NativeNorm {
    fn bytes(&self) -> usize {
        size_of_val(&self.weight[..]) + size_of_val(&self.bias[..])
    }
}

impl ResidentPart for PackedExpert {
    fn bytes(&self) -> usize {
        Self::bytes(self)
    }
}

/// Inverse frequencies of a rotary embedding and the factor on its cosines and sines.
pub struct NativeRope {
    frequencies: Vec<f32>,
    factor: f32,
    layout: RopeLayout,
    /// Dtype that cosines, sines and products are rounded to.
    dtype: Dtype,
}

/// Cosines and sines of the rotary embedding: rows x half of the rotated elements.
pub struct NativeAngles {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
    layout: RopeLayout,
    dtype: Dtype,
}

impl Native {
    fn tensor(&self, rows: usize, width: usize) -> Rows {
        Rows::new(&self.buffers, self.dtype, rows, width)
    }

    /// Applies an operation to every row of `x`.
    fn apply(&self, operation: &RowOperation<'_>, x: &mut Rows) -> Result<(), KernelError> {
        let (dtype, width) = (x.dtype, x.width);
        self.pool.apply(operation, dtype, width, x.bytes_mut())
    }

    /// Reads a tensor's elements, rounded to the compute dtype, as float32.
    fn load_rounded(&self, checkpoint: &Checkpoint, tensor: &TensorRef) -> Result<Vec<f32>, LoadModelError> {
        let bytes = self.load_bytes(checkpoint, tensor)?;
        let mut values = vec![0.0; bytes.len() / self.dtype.bytes()];
        elementwise::widen(self.dtype, &bytes, &mut values);
        Ok(values)
    }

    /// Reads a tensor's elements in the compute dtype, little endian.
    fn load_bytes(&self, checkpoint: &Checkpoint, tensor: &TensorRef) -> Result<Vec<u8>, LoadModelError> {
        if stored_dtype(tensor.dtype) == self.dtype.into() {
            return Ok(checkpoint.read(tensor)?);
        }
        let values = load_floats(checkpoint, tensor)?;
        let mut converted = vec![0; values.len() * self.dtype.bytes()];
        elementwise::narrow(self.dtype, &values, &mut converted);
        Ok(converted)
    }

    /// Writes the spans' positions to their pages with `write(shape, page, position in page, row)`, then attends.
    fn attend_pages(
        &self,
        pages: &mut NativePages,
        layer: usize,
        query: &Rows,
        sinks: Option<&[f32]>,
        spans: &[RowSpan],
        write: impl Fn(&AttentionShape, &mut [u8], usize, usize) -> Result<(), KernelError>,
    ) -> Result<Rows, BackendError> {
        let PagePart { shape, page_table, bytes: part } = pages.layer(layer)?;
        for span in spans {
            let page_ids = span.page_table(page_table);
            for row in 0..span.rows {
                let position = span.past + row;
                let (page, offset) = (position / PAGE_POSITIONS, position % PAGE_POSITIONS);
                let Some(&id) = page_ids.get(page).filter(|id| **id != RELEASED_PAGE) else {
                    return Err(BackendError::Shape { what: "page", actual: page, expected: page_ids.len() });
                };
                write(&shape, &mut pages.page_mut(id)?[part.clone()], offset, span.first_row + row)?;
            }
        }
        let layer_pages: Vec<Vec<&[u8]>> =
            spans.iter().map(|span| pages.parts(span.page_table(page_table), &part)).collect();
        let spans: Vec<AttentionSpan<'_>> = (spans.iter().zip(&layer_pages))
            .map(|(span, pages)| AttentionSpan { pages, past: span.past, rows: span.rows })
            .collect();
        let mut attended = self.tensor(query.rows, shape.heads() * shape.value_dim);
        self.pool.attend(&shape, query.bytes(), sinks, &spans, attended.bytes_mut())?;
        Ok(attended)
    }
}

/// Returns the bytes of row `row` of `x`.
fn row(x: &Rows, row: usize) -> &[u8] {
    &x.bytes()[row * x.row_bytes()..][..x.row_bytes()]
}

impl Backend for Native {
    const NAME: &'static str = "native";
    type Tensor = Rows;
    type Embedding = NativeEmbedding;
    type Linear = NativeLinear;
    type Norm = NativeNorm;
    type GatedMlp = PackedExpert;
    type UpProjections = NativeUpProjections;
    type Rope = NativeRope;
    type Angles = NativeAngles;
    type Vector = Vec<f32>;
    type Pages = NativePages;
    type PreparedSpans = Vec<RowSpan>;

    fn open(device: Option<DeviceName>, dtype: Dtype, pool: &Arc<Pool>) -> Result<Self, DeviceError> {
        match device {
            None | Some(DeviceName::Cpu) => {
                let (pool, cache_format) = (pool.clone(), CacheFormat::default());
                Ok(Self { pool, dtype, cache_format, buffers: BufferPool::default() })
            }
            Some(device) => Err(DeviceError::Foreign { device, backend: Self::NAME }),
        }
    }

    fn device(&self) -> DeviceName {
        DeviceName::Cpu
    }

    fn set_cache_format(&mut self, format: CacheFormat) -> bool {
        self.cache_format = format;
        true
    }

    fn cache_format(&self) -> CacheFormat {
        self.cache_format
    }

    fn load_embedding(
        &self,
        checkpoint: &Arc<Checkpoint>,
        table: &TensorRef,
        class: NumericsClass,
    ) -> Result<NativeEmbedding, LoadModelError> {
        NativeEmbedding::load(self, checkpoint, table, class)
    }

    fn deferred_weights(&self, table: &NativeEmbedding) -> Option<Arc<dyn DeferredWeights>> {
        table.deferred_weights()
    }

    fn tied_embedding(&self, weight: &NativeLinear) -> Option<NativeEmbedding> {
        Some(NativeEmbedding::Packed(weight.matrix.clone()))
    }

    fn load_linear(
        &self,
        checkpoint: &Checkpoint,
        parts: &[Affine<'_>],
        class: NumericsClass,
        threads: usize,
    ) -> Result<NativeLinear, LoadModelError> {
        let weights: Vec<_> = parts.iter().map(|part| part.weight).collect();
        let matrix = Arc::new(load_matrix(checkpoint, &weights, class, threads)?);
        let bias = match parts.iter().any(|part| part.bias.is_some()) {
            false => None,
            true => {
                let mut all = Vec::with_capacity(matrix.outputs());
                for part in parts {
                    match part.bias {
                        Some(bias) => all.extend(self.load_rounded(checkpoint, bias)?),
                        None => all.resize(all.len() + part.weight.shape.first().copied().unwrap_or(0), 0.0),
                    }
                }
                Some(all)
            }
        };
        Ok(NativeLinear { matrix, bias })
    }

    fn load_norm(
        &self,
        checkpoint: &Checkpoint,
        norm: Affine<'_>,
        kind: NormKind,
        epsilon: f64,
    ) -> Result<NativeNorm, LoadModelError> {
        let bias = norm.bias.map(|bias| self.load_rounded(checkpoint, bias)).transpose()?;
        let weight = self.load_rounded(checkpoint, norm.weight)?;
        Ok(NativeNorm { kind, weight, bias: bias.unwrap_or_default(), epsilon: epsilon as f32 })
    }

    fn load_gated(
        &self,
        checkpoint: &Checkpoint,
        tensors: &MlpTensors,
        _activation: Activation,
        class: NumericsClass,
    ) -> Result<PackedExpert, LoadModelError> {
        Ok(load_gated(checkpoint, tensors, class)?)
    }

    fn load_up_projections(
        &self,
        checkpoint: &Checkpoint,
        expand: &TensorRef,
        facts: &MlaFacts,
        class: NumericsClass,
    ) -> Result<NativeUpProjections, LoadModelError> {
        NativeUpProjections::load(checkpoint, expand, facts, class)
    }

    fn rope(&self, facts: &RopeFacts) -> Result<NativeRope, BackendError> {
        Ok(NativeRope {
            frequencies: facts.inverse_frequencies(),
            factor: facts.attention_factor as f32,
            layout: facts.layout,
            dtype: if facts.in_float32 { Dtype::F32 } else { self.dtype },
        })
    }

    fn new_pages(&self, layers: &[PagedLayer]) -> NativePages {
        NativePages::new(layers)
    }

    fn page_bytes(pages: &NativePages) -> usize {
        pages.page_bytes
    }

    fn upload_vector(&self, values: &[f32]) -> Result<Vec<f32>, BackendError> {
        Ok(values.to_vec())
    }

    fn prepare_spans(&self, _pages: &NativePages, spans: Vec<RowSpan>) -> Result<Vec<RowSpan>, BackendError> {
        Ok(spans)
    }

    fn copy_page(&self, pages: &mut NativePages, from: usize, to: usize) -> Result<(), BackendError> {
        Ok(pages.copy(from, to)?)
    }

    fn embed(&self, table: &NativeEmbedding, tokens: &[u32]) -> Result<Rows, BackendError> {
        let (rows, width) = table.shape(self.dtype);
        if let Some(&token) = tokens.iter().find(|token| **token as usize >= rows) {
            return Err(BackendError::Shape { what: "token", actual: token as usize, expected: rows });
        }
        let mut out = self.tensor(tokens.len(), width);
        let row_bytes = out.row_bytes();
        table.look_up(&self.pool, tokens, row_bytes, out.bytes_mut())?;
        Ok(out)
    }

    fn linear(&self, weight: &NativeLinear, x: &Rows) -> Result<Rows, BackendError> {
        let matrix = &*weight.matrix;
        x.expect("inputs of a product", x.rows, matrix.inputs())?;
        let mut out = Rows::new(&self.buffers, matrix.dtype(), x.rows, matrix.outputs());
        let converted;
        let inputs = if matrix.dtype() == x.dtype {
            x.bytes()
        } else {
            let mut values = vec![0.0; x.rows * x.width];
            elementwise::widen(x.dtype, x.bytes(), &mut values);
            let mut bytes = vec![0; values.len() * matrix.dtype().bytes()];
            elementwise::narrow(matrix.dtype(), &values, &mut bytes);
            converted = bytes;
            &converted
        };
        self.pool.multiply(&mut [MatrixProduct { matrix, inputs, output: out.bytes_mut() }])?;
        if let Some(bias) = &weight.bias {
            self.apply(&RowOperation::AddRow(bias), &mut out)?;
        }
        Ok(out)
    }

    fn norm(&self, norm: &NativeNorm, x: &Rows) -> Result<Rows, BackendError> {
        let width = norm.weight.len();
        if width == 0 || !x.width.is_multiple_of(width) {
            return Err(BackendError::Shape { what: "weights of a norm", actual: x.width, expected: width });
        }
        let mut out = self.tensor(x.rows, x.width);
        let form = match norm.kind {
            NormKind::Rms => NormForm::Rms,
            NormKind::RmsInFloat32 => NormForm::RmsInFloat32,
            NormKind::Layer => NormForm::Layer,
        };
        let norm = Norm { form, weight: &norm.weight, bias: &norm.bias, epsilon: norm.epsilon };
        self.apply(&RowOperation::Norm { from: x.bytes(), norm }, &mut out)?;
        Ok(out)
    }

    fn split<const N: usize>(&self, x: Rows, widths: [usize; N]) -> Result<[Rows; N], BackendError> {
        x.expect("parts of a row", x.rows, widths.iter().sum())?;
        let mut first_column = 0;
        Ok(widths.map(|width| {
            let mut part = self.tensor(x.rows, width);
            let (from, bytes) = (first_column * x.dtype.bytes(), part.row_bytes());
            first_column += width;
            for (to, row) in
                part.bytes_mut().chunks_exact_mut(bytes).zip(x.bytes().chunks_exact(x.row_bytes()))
            {
                to.copy_from_slice(&row[from..from + bytes]);
            }
            part
        }))
    }

    fn clamp(&self, mut x: Rows, bound: f64) -> Result<Rows, BackendError> {
        self.apply(&RowOperation::Clamp(bound as f32), &mut x)?;
        Ok(x)
    }

    fn angles(&self, rope: &NativeRope, positions: &[usize]) -> Result<NativeAngles, BackendError> {
        let half = rope.frequencies.len();
        // In float64: platforms' cosines and sines then agree to the last bit of float32.
        let evaluate = |function: fn(f64) -> f64| -> Vec<f32> {
            let all = positions.iter().flat_map(|&position| {
                rope.frequencies.iter().map(move |frequency| f64::from(position as f32 * frequency))
            });
            all.map(|angle| function(angle) as f32 * rope.factor).collect()
        };
        let (mut cos, mut sin) = (evaluate(f64::cos), evaluate(f64::sin));
        if rope.dtype == Dtype::Bf16 {
            cos.iter_mut().chain(&mut sin).for_each(|x| *x = round_bf16(*x));
        }
        Ok(NativeAngles { cos, sin, half, layout: rope.layout, dtype: rope.dtype })
    }

    fn select_angles(&self, angles: &NativeAngles, rows: &[usize]) -> Result<NativeAngles, BackendError> {
        let half = angles.half;
        let count = angles.cos.len() / half.max(1);
        if let Some(&row) = rows.iter().find(|row| **row >= count) {
            return Err(BackendError::Shape { what: "row of angles", actual: row, expected: count });
        }
        let select = |all: &[f32]| rows.iter().flat_map(|row| &all[row * half..][..half]).copied().collect();
        Ok(NativeAngles { cos: select(&angles.cos), sin: select(&angles.sin), ..*angles })
    }

    fn rotate(&self, angles: &NativeAngles, mut x: Rows, head_dim: usize) -> Result<Rows, BackendError> {
        let (dtype, half) = (angles.dtype, angles.half);
        x.expect("angles of rows", angles.cos.len() / half.max(1), x.width)?;
        if head_dim < 2 * half || !x.width.is_multiple_of(head_dim) {
            return Err(BackendError::Shape {
                what: "elements of a head",
                actual: head_dim,
                expected: 2 * half,
            });
        }
        let is_interleaved = angles.layout == RopeLayout::Interleaved;
        let (cos, sin) = (&angles.cos[..], &angles.sin[..]);
        let rotation = Rotation { cos, sin, half, head_dim, is_interleaved, dtype };
        self.apply(&RowOperation::Rotate(rotation), &mut x)?;
        Ok(x)
    }

    fn attend(
        &self,
        pages: &mut NativePages,
        layer: usize,
        [query, key, value]: [Rows; 3],
        sinks: Option<&Vec<f32>>,
        spans: &Vec<RowSpan>,
    ) -> Result<Rows, BackendError> {
        self.attend_pages(
            pages,
            layer,
            &query,
            sinks.map(Vec::as_slice),
            spans,
            |shape, page, offset, index| shape.write(page, offset, row(&key, index), row(&value, index)),
        )
    }

    fn attend_latent(
        &self,
        pages: &mut NativePages,
        layer: usize,
        projections: &NativeUpProjections,
        [query, latent, key]: [Rows; 3],
        spans: &Vec<RowSpan>,
    ) -> Result<Rows, BackendError> {
        let query = projections.absorb_query(&self.pool, &self.buffers, &query)?;
        let attended =
            self.attend_pages(pages, layer, &query, None, spans, |shape, page, offset, index| {
                shape.write(page, offset, &[row(&latent, index), row(&key, index)].concat(), &[])
            })?;
        projections.expand_values(&self.pool, &self.buffers, &attended)
    }

    fn add(&self, mut x: Rows, y: &Rows) -> Result<Rows, BackendError> {
        y.expect("a sum", x.rows, x.width)?;
        self.apply(&RowOperation::AddRows(y.bytes()), &mut x)?;
        Ok(x)
    }

    fn add_rows(&self, x: &mut Rows, first: usize, y: &Rows) -> Result<(), BackendError> {
        y.expect("rows to add", y.rows, x.width)?;
        if first + y.rows > x.rows {
            return Err(BackendError::Shape {
                what: "rows to add to",
                actual: first + y.rows,
                expected: x.rows,
            });
        }
        let (dtype, row_bytes) = (x.dtype, x.row_bytes());
        let rows = &mut x.bytes_mut()[first * row_bytes..][..y.rows * row_bytes];
        self.pool.apply(&RowOperation::AddRows(y.bytes()), dtype, y.width, rows)?;
        Ok(())
    }

    fn gated(&self, network: &PackedExpert, x: &Rows) -> Result<Rows, BackendError> {
        let mut out = self.tensor(x.rows, x.width);
        let rows: Vec<u32> = (0..).zip(0..x.rows).map(|(row, _)| row).collect();
        let job = ExpertJob { expert: network, inputs: x.bytes(), row_index: &rows, output: out.bytes_mut() };
        self.pool.forward(&mut [job])?;
        Ok(out)
    }

    fn scale(&self, mut x: Rows, factor: f64) -> Result<Rows, BackendError> {
        self.apply(&RowOperation::Scale(factor as f32), &mut x)?;
        Ok(x)
    }

    fn scale_by_sigmoid(&self, mut x: Rows, gate: &Rows) -> Result<Rows, BackendError> {
        gate.expect("gates of rows", x.rows, 1)?;
        let mut factors = self.host_floats(gate)?;
        for factor in &mut factors {
            *factor = 1.0 / (1.0 + exp(-*factor));
            if x.dtype == Dtype::Bf16 {
                *factor = round_bf16(*factor);
            }
        }
        self.apply(&RowOperation::ScaleRows(&factors), &mut x)?;
        Ok(x)
    }

    fn select_rows(&self, x: &Rows, rows: &[usize]) -> Result<Rows, BackendError> {
        let mut out = self.tensor(rows.len(), x.width);
        for (&index, to) in rows.iter().zip(out.bytes_mut().chunks_exact_mut(x.row_bytes())) {
            if index >= x.rows {
                return Err(BackendError::Shape { what: "row", actual: index, expected: x.rows });
            }
            to.copy_from_slice(row(x, index));
        }
        Ok(out)
    }

    fn host_bytes<'a>(&self, x: &'a Rows) -> Result<Cow<'a, [u8]>, BackendError> {
        Ok(Cow::Borrowed(x.bytes()))
    }

    fn host_floats(&self, x: &Rows) -> Result<Vec<f32>, BackendError> {
        let mut values = vec![0.0; x.rows * x.width];
        elementwise::widen(x.dtype, x.bytes(), &mut values);
        Ok(values)
    }

    fn tensor_from_host<E: From<BackendError>>(
        &self,
        rows: usize,
        width: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Rows, E> {
        let mut out = self.tensor(rows, width);
        fill(out.bytes_mut())?;
        Ok(out)
    }
}
