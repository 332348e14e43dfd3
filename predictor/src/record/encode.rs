//! Encoding of a record: its form in memory and its bytes.

use crate::phase::Phase;
use crate::record::layout::Layout;
use crate::record::{RecordError, RecordHeader, npy};

/// Expert activations of one request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ActivationRecord {
    /// Token ids of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// Assignments of prompt tokens to experts, [layers, experts]: element `l * experts + k` counts the tokens that
    /// used expert k of the l-th layer with experts. A row sums to prompt tokens x `top_k`.
    pub prefill: Vec<u32>,
    /// Assignments of the decode steps, in the same shape; all 0 without decode steps.
    pub decode: Vec<u32>,
    /// Number of decode steps: forward passes of one token after the prefill.
    pub steps: u32,
    /// Experts of every token, [layers, prompt tokens + steps, `top_k`], ascending within a token. Present exactly if
    /// the header says `tokens`.
    pub experts: Option<Vec<u16>>,
}

impl ActivationRecord {
    /// Returns the counts of a phase. Returns `None` if the request had no decode step.
    #[must_use]
    pub fn counts(&self, phase: Phase) -> Option<&[u32]> {
        match phase {
            Phase::Prefill => Some(&self.prefill),
            Phase::Decode => (self.steps > 0).then_some(&self.decode),
        }
    }
}

/// Encodes the start of a record file.
///
/// # Errors
/// The header is invalid.
pub fn encode_header(header: &RecordHeader) -> Result<Vec<u8>, RecordError> {
    let json = header.to_json()?;
    let mut bytes = npy::envelope("'|u1'", &format!("({},)", json.len()));
    bytes.extend_from_slice(&json);
    Ok(bytes)
}

/// Encodes one record, to be appended in one write.
///
/// # Errors
/// The record does not match `header`, or exceeds [`crate::record::MAX_RECORD_BYTES`].
pub fn encode_record(header: &RecordHeader, record: &ActivationRecord) -> Result<Vec<u8>, RecordError> {
    let layout = layout_of(header, record)?;
    let mut bytes = layout.envelope();
    let total = layout.checked_total(bytes.len())?;
    bytes.reserve_exact(total - bytes.len());
    bytes.extend_from_slice(&record.steps.to_le_bytes());
    bytes.extend(record.prompt.iter().flat_map(|id| id.to_le_bytes()));
    push_counts(&mut bytes, &record.prefill, layout.prefill_wide);
    push_counts(&mut bytes, &record.decode, layout.decode_wide);
    let experts = record.experts.as_deref().unwrap_or_default();
    if layout.id_width() == 1 {
        bytes.extend(experts.iter().map(|&id| id as u8));
    } else {
        bytes.extend(experts.iter().flat_map(|id| id.to_le_bytes()));
    }
    let check = crc32fast::hash(&bytes);
    bytes.extend_from_slice(&check.to_le_bytes());
    Ok(bytes)
}

fn layout_of(header: &RecordHeader, record: &ActivationRecord) -> Result<Layout, RecordError> {
    header.check()?;
    let value = |field, message: &str| Err(RecordError::Value { field, message: message.to_owned() });
    if record.prompt.is_empty() {
        return value("prompt", "is empty, expected at least one token");
    }
    for (field, counts) in [("prefill", &record.prefill), ("decode", &record.decode)] {
        if counts.len() != header.cells() {
            return Err(RecordError::Shape { field, expected: header.cells(), found: counts.len() });
        }
    }
    let positions = record.prompt.len() + record.steps as usize;
    match &record.experts {
        None if header.tokens => {
            return value("experts", "is missing, but the header announces it (`tokens`)");
        }
        Some(_) if !header.tokens => {
            return value("experts", "is present, but the header does not announce it (`tokens`)");
        }
        Some(ids) => {
            let expected = positions * header.layers.len() * header.top_k as usize;
            if ids.len() != expected {
                return Err(RecordError::Shape { field: "experts", expected, found: ids.len() });
            }
            if ids.iter().any(|&id| u32::from(id) >= header.experts) {
                return value("experts", "has an expert that the model lacks");
            }
        }
        None => {}
    }
    let wide = |counts: &[u32]| counts.iter().any(|&count| count > u32::from(u16::MAX));
    Ok(Layout {
        prompt: record.prompt.len(),
        prefill_wide: wide(&record.prefill),
        decode_wide: wide(&record.decode),
        positions: header.tokens.then_some(positions),
        layers: header.layers.len(),
        experts: header.experts as usize,
        top_k: header.top_k as usize,
    })
}

fn push_counts(bytes: &mut Vec<u8>, counts: &[u32], wide: bool) {
    if wide {
        bytes.extend(counts.iter().flat_map(|count| count.to_le_bytes()));
    } else {
        bytes.extend(counts.iter().flat_map(|&count| (count as u16).to_le_bytes()));
    }
}

/// Decodes the record in `data`, which has the length of `layout`. Returns `None` if a value is invalid.
pub(super) fn decode_record(layout: &Layout, header: &RecordHeader, data: &[u8]) -> Option<ActivationRecord> {
    let (steps, rest) = data.split_first_chunk::<4>()?;
    let steps = u32::from_le_bytes(*steps);
    let (prompt, rest) = rest.split_at_checked(layout.prompt * 4)?;
    let cells = layout.layers * layout.experts;
    let (prefill, rest) = rest.split_at_checked(cells * layout.prefill_width())?;
    let (decode, rest) = rest.split_at_checked(cells * layout.decode_width())?;
    let experts = match layout.positions {
        None => None,
        Some(positions) => {
            if positions != layout.prompt.checked_add(steps as usize)? {
                return None;
            }
            let count = layout.layers * positions * layout.top_k;
            let (ids, _) = rest.split_at_checked(count * layout.id_width())?;
            let ids: Vec<u16> = match layout.id_width() {
                1 => ids.iter().map(|&id| u16::from(id)).collect(),
                _ => ids.as_chunks().0.iter().map(|id| u16::from_le_bytes(*id)).collect(),
            };
            if ids.iter().any(|&id| u32::from(id) >= header.experts) {
                return None;
            }
            Some(ids)
        }
    };
    Some(ActivationRecord {
        prompt: decode_u32(prompt),
        prefill: if layout.prefill_wide { decode_u32(prefill) } else { decode_u16(prefill) },
        decode: if layout.decode_wide { decode_u32(decode) } else { decode_u16(decode) },
        steps,
        experts,
    })
}

fn decode_u32(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|count| u32::from_le_bytes(*count)).collect()
}

fn decode_u16(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|count| u32::from(u16::from_le_bytes(*count))).collect()
}
