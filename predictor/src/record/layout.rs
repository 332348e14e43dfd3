//! Layout of one record: sizes and element types of its fields.

use crate::record::npy::{self, DictParser};
use crate::record::{MAX_RECORD_BYTES, RecordError, RecordHeader};

/// Layout of one record, as its `.npy` dict describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// Tokens of the prompt.
    pub(super) prompt: usize,
    /// True if prefill counts take four bytes instead of two.
    pub(super) prefill_wide: bool,
    /// True if decode counts take four bytes instead of two.
    pub(super) decode_wide: bool,
    /// Number of positions with per-token experts, if the record has them.
    pub(super) positions: Option<usize>,
    /// Number of layers in the count arrays.
    pub(super) layers: usize,
    /// Number of experts per layer.
    pub(super) experts: usize,
    /// Experts per token.
    pub(super) top_k: usize,
}

/// Returns the size of a count, in bytes.
fn count_bytes(wide: bool) -> usize {
    if wide { 4 } else { 2 }
}

impl Layout {
    /// Returns the size of one prefill count, in bytes.
    pub(super) fn prefill_width(&self) -> usize {
        count_bytes(self.prefill_wide)
    }

    pub(super) fn decode_width(&self) -> usize {
        count_bytes(self.decode_wide)
    }

    /// Returns the size of one expert id, in bytes.
    pub(super) fn id_width(&self) -> usize {
        if self.experts <= 256 { 1 } else { 2 }
    }

    /// Returns the `.npy` header of the record's array.
    pub(super) fn envelope(&self) -> Vec<u8> {
        let Self { prompt, layers, experts, top_k, .. } = self;
        let count = |wide| if wide { "<u4" } else { "<u2" };
        let (prefill, decode) = (count(self.prefill_wide), count(self.decode_wide));
        let tokens = self.positions.map_or(String::new(), |positions| {
            let id = if self.id_width() == 1 { "|u1" } else { "<u2" };
            format!("('experts', '{id}', ({layers}, {positions}, {top_k})), ")
        });
        let descr = format!(
            "[('steps', '<u4'), ('prompt', '<u4', ({prompt},)), ('prefill', '{prefill}', ({layers}, {experts})), \
             ('decode', '{decode}', ({layers}, {experts})), {tokens}('check', '<u4')]"
        );
        npy::envelope(&descr, "()")
    }

    /// Parses the layout that `dict` describes. Returns `None` unless it is a record of `header`'s model.
    pub(super) fn parse(dict: &[u8], header: &RecordHeader) -> Option<Self> {
        let mut dict = DictParser::new(dict);
        dict.expect(&["{", "'descr'", ":", "[", "(", "'steps'", ",", "'<u4'", ")", ","])?;
        dict.expect(&["(", "'prompt'", ",", "'<u4'", ","])?;
        let [prompt] = dict.tuple()?;
        dict.expect(&[")", ",", "(", "'prefill'", ","])?;
        let (prefill_wide, prefill) = counts(&mut dict)?;
        dict.expect(&[")", ",", "(", "'decode'", ","])?;
        let (decode_wide, decode) = counts(&mut dict)?;
        dict.expect(&[")", ",", "("])?;
        let wanted = [header.layers.len(), header.experts as usize];
        let mut layout = Self {
            prompt,
            prefill_wide,
            decode_wide,
            positions: None,
            layers: wanted[0],
            experts: wanted[1],
            top_k: header.top_k as usize,
        };
        if header.tokens {
            let id = if layout.id_width() == 1 { "'|u1'" } else { "'<u2'" };
            dict.expect(&["'experts'", ",", id, ","])?;
            let [layers, positions, top_k] = dict.tuple()?;
            dict.expect(&[")", ",", "("])?;
            if [layers, top_k] != [layout.layers, layout.top_k] || positions < prompt {
                return None;
            }
            layout.positions = Some(positions);
        }
        dict.expect(&["'check'", ",", "'<u4'", ")", "]", ","])?;
        dict.end_of_scalar()?;
        (prompt > 0 && prefill == wanted && decode == wanted).then_some(layout)
    }

    /// Returns the size of the data with the checksum, in bytes. Returns `None` on overflow.
    pub(super) fn data_bytes(&self) -> Option<u64> {
        let cells = (self.layers as u64).checked_mul(self.experts as u64)?;
        let counts = cells.checked_mul((self.prefill_width() + self.decode_width()) as u64)?;
        let ids = (self.positions.unwrap_or(0) as u64)
            .checked_mul(self.layers as u64)?
            .checked_mul(self.top_k as u64)?
            .checked_mul(self.id_width() as u64)?;
        (self.prompt as u64).checked_mul(4)?.checked_add(counts)?.checked_add(ids)?.checked_add(8)
    }

    /// Returns the size of the data and the `.npy` header of `envelope` bytes, if it is within the limit for one
    /// record.
    pub(super) fn checked_total(&self, envelope: usize) -> Result<usize, RecordError> {
        let bytes = self.data_bytes().map_or(u64::MAX, |data| data.saturating_add(envelope as u64));
        if bytes > MAX_RECORD_BYTES {
            return Err(RecordError::TooLarge {
                what: "an activation record",
                bytes,
                limit: MAX_RECORD_BYTES,
                remedy: "omit the experts of every token, or use a shorter prompt",
            });
        }
        Ok(bytes as usize)
    }
}

/// Parses the element type of a count array (true if wide) and its shape.
fn counts(dict: &mut DictParser<'_>) -> Option<(bool, [usize; 2])> {
    let wide = !dict.accept("'<u2'");
    if wide {
        dict.expect(&["'<u4'"])?;
    }
    dict.expect(&[","])?;
    Some((wide, dict.tuple()?))
}
