//! Attention over pages: its results, which depend only on a row's own query and positions.

use crate::common;

use common::SplitMix64;
use remoe_kernels::activations::exp;
use remoe_kernels::numerics::{add, div, fma, from_bf16, mul, to_bf16};
use remoe_kernels::{
    AttentionShape, AttentionSpan, CACHE_GROUP, CacheFormat, Dtype, InstructionPath, PAGE_POSITIONS, Pool,
    PoolConfig,
};
use std::ops::Range;

fn pool(threads: usize, path: Option<InstructionPath>) -> Pool {
    Pool::new(PoolConfig { threads, path, ..PoolConfig::default() }).unwrap()
}

fn bytes(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|&value| to_bf16(value).to_le_bytes()).collect(),
    }
}

fn floats(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
        Dtype::Bf16 => bytes.as_chunks().0.iter().map(|&b| from_bf16(u16::from_le_bytes(b))).collect(),
    }
}

/// Returns the elements of heads of `dim` elements after quantisation to int8.
fn as_int8(elements: &[f32], dim: usize) -> Vec<f32> {
    let groups = elements.chunks(dim).flat_map(|head| head.chunks(CACHE_GROUP));
    let kept = |group: &[f32]| {
        let scale = from_bf16(to_bf16(group.iter().fold(0.0_f32, |most, x| most.max(x.abs())) / 127.0));
        let kept = |x: &f32| (x / scale).round_ties_even().clamp(-127.0, 127.0) * scale;
        group.iter().map(kept).collect::<Vec<f32>>()
    };
    groups.flat_map(kept).collect()
}

/// Sequence with keys, values and queries of all positions.
struct Sequence {
    pages: Vec<Vec<u8>>,
    keys: Vec<f32>,
    values: Vec<f32>,
    query: Vec<f32>,
    positions: usize,
}

impl Sequence {
    /// Creates a sequence of random elements. All bytes of its pages that are not written are those of NaN.
    fn new(shape: &AttentionShape, positions: usize, seed: u64) -> Self {
        let mut random = SplitMix64(seed);
        let mut draw = |n: usize| {
            let drawn: Vec<f32> = (0..n).map(|_| 2.0 * random.unit()).collect();
            floats(&bytes(&drawn, shape.dtype), shape.dtype)
        };
        let (key, value) = (shape.kv_heads * shape.key_dim, shape.kv_heads * shape.value_dim);
        let keys = draw(positions * key);
        let values = if shape.latent { Vec::new() } else { draw(positions * value) };
        let query = draw(positions * shape.heads() * shape.key_dim);
        let mut pages = vec![vec![0xff; shape.page_bytes()]; positions.div_ceil(PAGE_POSITIONS)];
        for position in 0..positions {
            let stored = if shape.latent { &[] } else { &values[position * value..][..value] };
            let page = &mut pages[position / PAGE_POSITIONS];
            let key = bytes(&keys[position * key..][..key], shape.dtype);
            shape.write(page, position % PAGE_POSITIONS, &key, &bytes(stored, shape.dtype)).unwrap();
        }
        let (keys, mut values) = match shape.cache {
            CacheFormat::Plain => (keys, values),
            CacheFormat::Int8 => (as_int8(&keys, shape.key_dim), as_int8(&values, shape.value_dim)),
        };
        if shape.latent {
            values = keys.chunks(shape.key_dim).flat_map(|key| key[..shape.value_dim].to_vec()).collect();
        }
        Self { pages, keys, values, query, positions }
    }

    /// Computes a row in float64 from the definition of attention.
    fn expected(&self, shape: &AttentionShape, token: usize) -> Vec<f64> {
        let mut out = Vec::new();
        for head in 0..shape.heads() {
            let kv = head / shape.group;
            let query = &self.query[(token * shape.heads() + head) * shape.key_dim..][..shape.key_dim];
            let from = shape.window.map_or(0, |window| (token + 1).saturating_sub(window));
            let scores: Vec<f64> = (from..=token)
                .map(|position| {
                    let key = &self.keys[(position * shape.kv_heads + kv) * shape.key_dim..][..shape.key_dim];
                    let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                    dot * shape.scale
                })
                .collect();
            let sink = sinks(shape).map(|sinks| f64::from(sinks[head]));
            let largest = scores.iter().copied().chain(sink).fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum: f64 = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - largest).exp());
            out.extend((0..shape.value_dim).map(|dim| {
                let value = |position: usize| {
                    f64::from(self.values[(position * shape.kv_heads + kv) * shape.value_dim + dim])
                };
                (from..=token).zip(&weights).map(|(position, weight)| weight * value(position)).sum::<f64>()
                    / sum
            }));
        }
        out
    }
}

/// Positions of a part, whose sums start from zero.
const PART: usize = 1024;

/// Computes the largest score, the sums of weights and the sums of weighted values over the positions `seen`.
fn defined_part(
    sequence: &Sequence,
    shape: &AttentionShape,
    query: &[f32],
    kv: usize,
    seen: Range<usize>,
    sink: Option<f32>,
) -> (f32, [f32; 16], Vec<f32>) {
    let (mut largest, mut sums, mut mixed) =
        (sink.unwrap_or(f32::NEG_INFINITY), [0.0; 16], vec![0.0; shape.value_dim]);
    sums[0] = if sink.is_some() { 1.0 } else { 0.0 };
    for page in seen.start / PAGE_POSITIONS..seen.end.div_ceil(PAGE_POSITIONS) {
        let begin = page * PAGE_POSITIONS;
        let seen = seen.start.max(begin)..seen.end.min(begin + PAGE_POSITIONS);
        let scores: Vec<f32> = seen
            .clone()
            .map(|position| {
                let key = &sequence.keys[(position * shape.kv_heads + kv) * shape.key_dim..];
                let at = |of: &[f32], dim: usize| if dim < shape.key_dim { of[dim] } else { 0.0 };
                let dims = (0..shape.key_dim.div_ceil(2)).flat_map(|pair| [2 * pair + 1, 2 * pair]);
                let sum = dims.fold(0.0, |sum, dim| fma(at(query, dim), at(key, dim), sum));
                mul(sum, shape.scale as f32)
            })
            .collect();
        let best = scores.iter().copied().fold(largest, f32::max);
        let mut factor = 1.0;
        if best > largest {
            factor = exp(largest - best);
            sums = sums.map(|sum| mul(sum, factor));
            largest = best;
        }
        mixed.iter_mut().for_each(|mixed| *mixed = mul(*mixed, factor));
        for (position, score) in seen.zip(scores) {
            let weight = exp(add(score, -largest));
            sums[position % 16] = add(sums[position % 16], weight);
            let value = &sequence.values[(position * shape.kv_heads + kv) * shape.value_dim..];
            for (mixed, value) in mixed.iter_mut().zip(value) {
                *mixed = fma(weight, *value, *mixed);
            }
        }
    }
    (largest, sums, mixed)
}

/// Computes a row by the scalar definition, with all sums in the documented order.
fn defined(sequence: &Sequence, shape: &AttentionShape, token: usize, head: usize) -> Vec<f32> {
    let kv = head / shape.group;
    let query = &sequence.query[(token * shape.heads() + head) * shape.key_dim..][..shape.key_dim];
    let (from, end) = (shape.window.map_or(0, |window| (token + 1).saturating_sub(window)), token + 1);
    let sink = sinks(shape).map(|sinks| sinks[head]);
    let (mut largest, mut sums, mut mixed) = (f32::NEG_INFINITY, [0.0; 16], Vec::new());
    for part in from / PART..end.div_ceil(PART) {
        let seen = from.max(part * PART)..end.min((part + 1) * PART);
        let sink = sink.filter(|_| mixed.is_empty());
        let (own, own_sums, own_mixed) = defined_part(sequence, shape, query, kv, seen, sink);
        if mixed.is_empty() {
            (largest, sums, mixed) = (own, own_sums, own_mixed);
            continue;
        }
        let new = largest.max(own);
        let (before, factor) = (exp(largest - new), exp(own - new));
        let merge = |total: &mut f32, own: f32| *total = fma(own, factor, mul(*total, before));
        sums.iter_mut().zip(own_sums).for_each(|(total, own)| merge(total, own));
        mixed.iter_mut().zip(own_mixed).for_each(|(total, own)| merge(total, own));
        largest = new;
    }
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            sums[lane] = add(sums[lane], sums[lane + half]);
        }
    }
    mixed.into_iter().map(|mixed| div(mixed, sums[0])).collect()
}

/// Computes the rows `from..to` of each sequence in one call.
fn attend(pool: &Pool, shape: &AttentionShape, parts: &[(&Sequence, usize, usize)]) -> Vec<Vec<u8>> {
    let row = shape.heads() * shape.key_dim;
    let query: Vec<f32> =
        parts.iter().flat_map(|(it, from, to)| it.query[from * row..to * row].to_vec()).collect();
    let pages: Vec<Vec<&[u8]>> =
        parts.iter().map(|(it, _, _)| it.pages.iter().map(Vec::as_slice).collect()).collect();
    let spans: Vec<AttentionSpan<'_>> = parts
        .iter()
        .zip(&pages)
        .map(|(&(_, from, to), pages)| AttentionSpan { pages, past: from, rows: to - from })
        .collect();
    let rows: usize = spans.iter().map(|span| span.rows).sum();
    let row = shape.heads() * shape.value_dim * shape.dtype.bytes();
    let mut output = vec![0; rows * row];
    pool.attend(shape, &bytes(&query, shape.dtype), sinks(shape), &spans, &mut output).unwrap();
    output.chunks(row).map(<[u8]>::to_vec).collect()
}

/// Returns the sinks of shapes with four key heads, from negligible ones to ones that outweigh all positions.
fn sinks(shape: &AttentionShape) -> Option<&'static [f32]> {
    (shape.kv_heads == 4).then_some(&[-1000.0, -3.0, -0.5, 0.0, 1.5, 4.0, 40.0, 1000.0])
}

fn shapes() -> Vec<AttentionShape> {
    let plain = AttentionShape {
        dtype: Dtype::F32,
        kv_heads: 2,
        group: 3,
        key_dim: 20,
        value_dim: 20,
        latent: false,
        scale: 0.3,
        window: None,
        cache: CacheFormat::Plain,
    };
    let latent = AttentionShape { kv_heads: 1, group: 5, key_dim: 41, value_dim: 34, latent: true, ..plain };
    let wide = AttentionShape { kv_heads: 1, group: 1, key_dim: 128, value_dim: 128, scale: 0.09, ..plain };
    let float32 = [
        plain,
        AttentionShape { window: Some(7), ..plain },
        AttentionShape { window: Some(40), ..plain },
        latent,
        wide,
        AttentionShape { kv_heads: 4, group: 2, ..plain },
        AttentionShape { kv_heads: 4, group: 2, window: Some(9), ..plain },
        AttentionShape { group: 16, key_dim: 210, value_dim: 176, scale: 0.07, ..latent },
        AttentionShape { group: 5, key_dim: 130, value_dim: 144, scale: 0.09, ..plain },
    ];
    let both = |shape| [shape, AttentionShape { dtype: Dtype::Bf16, ..shape }];
    let plain = float32.into_iter().flat_map(both);
    plain.flat_map(|shape| [shape, AttentionShape { cache: CacheFormat::Int8, ..shape }]).collect()
}

#[test]
fn rows_are_softmax_over_their_visible_positions() {
    let pool = pool(2, None);
    for shape in shapes() {
        let sequence = Sequence::new(&shape, 83, 5);
        let rows = attend(&pool, &shape, &[(&sequence, 0, 83)]);
        let tolerance = if shape.dtype == Dtype::F32 { 1e-5 } else { 2e-2 };
        for (token, row) in rows.iter().enumerate() {
            for (found, expected) in floats(row, shape.dtype).iter().zip(sequence.expected(&shape, token)) {
                let difference = (f64::from(*found) - expected).abs();
                assert!(difference <= tolerance, "{shape:?}, row {token}: {found} for {expected}");
            }
        }
    }
}

/// Blocks of many rows and of few rows are computed by different code.
#[test]
fn results_equal_the_scalar_definition_bit_for_bit() {
    let pool = pool(2, None);
    for shape in shapes() {
        let sequence = Sequence::new(&shape, 71, 9);
        let rows = attend(&pool, &shape, &[(&sequence, 0, 71)]);
        for token in [0, 1, 30, 31, 32, 63, 70] {
            let expected: Vec<f32> =
                (0..shape.heads()).flat_map(|head| defined(&sequence, &shape, token, head)).collect();
            assert_eq!(rows[token], bytes(&expected, shape.dtype), "{shape:?}, row {token}");
            let alone = attend(&pool, &shape, &[(&sequence, token, token + 1)]);
            assert_eq!(alone[0], rows[token], "{shape:?}, row {token} alone");
        }
    }
}

/// Results have the same bits by every path, with every number of threads, beside other sequences, alone and in any
/// chunks.
#[test]
fn results_are_independent_of_neighbours_threads_and_paths() {
    for shape in shapes() {
        let sequences: Vec<Sequence> =
            [70, 33, 1].into_iter().zip(0..).map(|(n, seed)| Sequence::new(&shape, n, seed)).collect();
        let whole: Vec<_> = sequences.iter().map(|it| (it, 0, it.positions)).collect();
        let together = attend(&pool(1, None), &shape, &whole);
        for path in InstructionPath::available() {
            for threads in [1, 3] {
                assert_eq!(attend(&pool(threads, Some(path)), &shape, &whole), together, "{path} {shape:?}");
            }
        }
        let pool = pool(2, None);
        let mut first = 0;
        for sequence in &sequences {
            for cut in [1, 3, 32] {
                let mut chunks = Vec::new();
                for from in (0..sequence.positions).step_by(cut) {
                    let to = (from + cut).min(sequence.positions);
                    chunks.extend(attend(&pool, &shape, &[(sequence, from, to)]));
                }
                assert_eq!(chunks, together[first..first + sequence.positions], "{cut} rows, {shape:?}");
            }
            first += sequence.positions;
        }
    }
}

/// Threads share the positions of long contexts and merge their states in one order.
#[test]
fn long_contexts_give_equal_bits_on_any_number_of_threads() {
    let long = AttentionShape { kv_heads: 1, group: 2, key_dim: 12, value_dim: 18, ..shapes()[0] };
    let shapes = [
        long,
        AttentionShape { cache: CacheFormat::Int8, dtype: Dtype::Bf16, ..long },
        AttentionShape { window: Some(1500), ..long },
        AttentionShape { latent: true, key_dim: 20, group: 5, dtype: Dtype::Bf16, ..long },
        AttentionShape { kv_heads: 4, ..long },
    ];
    for shape in shapes {
        let sequence = Sequence::new(&shape, 2500, 21);
        let short = Sequence::new(&shape, 40, 22);
        let together = attend(&pool(1, None), &shape, &[(&sequence, 2000, 2500), (&short, 0, 40)]);
        for token in [2000, 2046, 2047, 2048, 2499] {
            let expected: Vec<f32> =
                (0..shape.heads()).flat_map(|head| defined(&sequence, &shape, token, head)).collect();
            assert_eq!(together[token - 2000], bytes(&expected, shape.dtype), "{shape:?}, row {token}");
        }
        for threads in [1, 2, 8, 64] {
            let pool = pool(threads, None);
            let all = attend(&pool, &shape, &[(&sequence, 2000, 2500), (&short, 0, 40)]);
            assert_eq!(all, together, "{threads} threads, {shape:?}");
            for (from, to) in [(2047, 2048), (2048, 2049), (2040, 2056), (2499, 2500)] {
                let rows = attend(&pool, &shape, &[(&short, 39, 40), (&sequence, from, to)]);
                assert_eq!(rows[0], together[539], "{threads} threads, {shape:?}");
                assert_eq!(rows[1..], together[from - 2000..to - 2000], "{threads} threads, {shape:?}");
            }
        }
        for path in InstructionPath::available() {
            let rows = attend(&pool(3, Some(path)), &shape, &[(&sequence, 2490, 2500)]);
            assert_eq!(rows, together[490..500], "{path} {shape:?}");
        }
    }
}

#[test]
fn int8_cache_takes_half_the_memory_and_rounds_by_its_scale() {
    let plain = AttentionShape {
        kv_heads: 4,
        group: 2,
        key_dim: 128,
        value_dim: 128,
        dtype: Dtype::Bf16,
        ..shapes()[0]
    };
    let int8 = AttentionShape { cache: CacheFormat::Int8, ..plain };
    let latent = AttentionShape { kv_heads: 1, key_dim: 576, value_dim: 512, latent: true, ..plain };
    for (plain, int8) in [(plain, int8), (latent, AttentionShape { cache: CacheFormat::Int8, ..latent })] {
        let (most, bytes) = (plain.page_bytes() as f64 * 0.53, int8.page_bytes() as f64);
        assert!(bytes <= most, "{bytes} bytes, not {most}");
    }
    // Zeros, elements too small for a scale, and infinite ones.
    let shape = AttentionShape { dtype: Dtype::F32, kv_heads: 1, group: 1, key_dim: 2, value_dim: 2, ..int8 };
    let pool = pool(1, None);
    let mixed = |value: [f32; 2]| {
        let mut page = vec![0; shape.page_bytes()];
        let (key, value) = (bytes(&[0.0, 1e-40], Dtype::F32), bytes(&value, Dtype::F32));
        shape.write(&mut page, 0, &key, &value).unwrap();
        let span = AttentionSpan { pages: &[&page], past: 0, rows: 1 };
        let mut output = vec![0; 8];
        pool.attend(&shape, &bytes(&[1.0, 1.0], Dtype::F32), None, &[span], &mut output).unwrap();
        floats(&output, Dtype::F32)
    };
    assert_eq!(mixed([0.0, 1e-40]), [0.0, 0.0]);
    assert_eq!(mixed([127.0, -63.0]), [127.0, -63.0]);
    for not_finite in [f32::INFINITY, f32::NAN] {
        assert!(mixed([1.0, not_finite]).iter().all(|mixed| mixed.is_nan()));
    }
}

#[test]
fn buffers_of_wrong_length_are_refused() {
    let shape = shapes()[0];
    let sequence = Sequence::new(&shape, 40, 1);
    let pages: Vec<&[u8]> = sequence.pages.iter().map(Vec::as_slice).collect();
    let pool = pool(1, None);
    let query = bytes(&sequence.query, shape.dtype);
    let mut output = vec![0; query.len()];
    let span = AttentionSpan { pages: &pages, past: 0, rows: 40 };
    pool.attend(&shape, &query, None, &[span], &mut output).unwrap();
    assert!(pool.attend(&shape, &query, Some(&[0.0; 5]), &[span], &mut output).is_err());
    assert!(pool.attend(&shape, &query[1..], None, &[span], &mut output).is_err());
    assert!(pool.attend(&shape, &query, None, &[span], &mut output[1..]).is_err());
    assert!(
        pool.attend(&shape, &query, None, &[AttentionSpan { pages: &pages[..1], ..span }], &mut output)
            .is_err()
    );
    let short = [pages[0], &pages[1][1..]];
    assert!(
        pool.attend(&shape, &query, None, &[AttentionSpan { pages: &short, ..span }], &mut output).is_err()
    );
    let mut page = vec![0; shape.page_bytes()];
    let entry = vec![0; 2 * 20 * 4];
    assert!(shape.write(&mut page, PAGE_POSITIONS, &entry, &entry).is_err());
    assert!(shape.write(&mut page, 0, &entry[1..], &entry).is_err());
    assert!(shape.write(&mut page[1..], 0, &entry, &entry).is_err());
}
