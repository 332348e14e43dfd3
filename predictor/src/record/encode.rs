//! A record in memory, and its bytes.

use crate::phase::Phase;
use crate::record::layout::Layout;
use crate::record::{RecordError, RecordHeader, npy};

/// Expert activations of one request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ActivationRecord {
    /// Token ids of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// Assignments of prompt tokens to experts, [layers, experts] row after row: element
    /// `l * experts + k` counts the tokens that used expert k of the l-th layer with experts. A row
    /// sums to prompt tokens x `top_k`.
    pub prefill: Vec<u32>,
    /// Counts of the decode steps, in the same form; all 0 where there were none.
    pub decode: Vec<u32>,
    /// Decode steps: forwards of one token after the prefill.
    pub steps: u32,
    /// The experts of every token, [layers, prompt tokens + steps, `top_k`], ascending within a token;
    /// there exactly when the header says `tokens`.
    pub experts: Option<Vec<u16>>,
}

impl ActivationRecord {
    /// The counts of a phase; `None` where the request had no decode step.
    #[must_use]
    pub fn counts(&self, phase: Phase) -> Option<&[u32]> {
        match phase {
            Phase::Prefill => Some(&self.prefill),
            Phase::Decode => (self.steps > 0).then_some(&self.decode),
        }
    }
}

/// The bytes that a record file begins with.
///
/// # Errors
/// The header describes no model.
pub fn encode_header(header: &RecordHeader) -> Result<Vec<u8>, RecordError> {
    let json = header.to_json()?;
    let mut bytes = npy::envelope("'|u1'", &format!("({},)", json.len()));
    bytes.extend_from_slice(&json);
    Ok(bytes)
}

/// The bytes of one record, to be appended in one write.
///
/// # Errors
/// The record does not have the form of `header`, or is larger than [`crate::record::MAX_RECORD_BYTES`].
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

/// The record in `data`, which has the length of `layout`; `None` where a value cannot be.
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
        prompt: wide_counts(prompt),
        prefill: if layout.prefill_wide { wide_counts(prefill) } else { narrow_counts(prefill) },
        decode: if layout.decode_wide { wide_counts(decode) } else { narrow_counts(decode) },
        steps,
        experts,
    })
}

fn wide_counts(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|count| u32::from_le_bytes(*count)).collect()
}

fn narrow_counts(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|count| u32::from(u16::from_le_bytes(*count))).collect()
}
