//! Header of one `.npy` array: magic, version 1.0, a padded Python dict.
//!
//! Format: `numpy.lib.format`, version 1.0, in C order only.

/// First bytes of every array: the magic and version 1.0.
pub(super) const MAGIC: &[u8; 8] = b"\x93NUMPY\x01\x00";
/// Bytes before the dict: the magic and the length of the dict, 16 bits little-endian.
pub(super) const PREFIX_BYTES: usize = 10;
/// Alignment of the data, so that a memory-mapped file is aligned.
const ALIGNMENT: usize = 64;

/// Encodes the header of an array with the type `descr` (a Python literal) and the shape `shape`.
pub(super) fn envelope(descr: &str, shape: &str) -> Vec<u8> {
    let dict = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}");
    let total = (PREFIX_BYTES + dict.len() + 1).next_multiple_of(ALIGNMENT);
    // The longest dict, with all fields and ten digits per number, is far below 16 bits.
    let length = u16::try_from(total - PREFIX_BYTES).unwrap_or(u16::MAX);
    let mut bytes = Vec::with_capacity(total);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(dict.as_bytes());
    bytes.resize(total - 1, b' ');
    bytes.push(b'\n');
    bytes
}

/// Returns the length of the dict from the first [`PREFIX_BYTES`] bytes. Returns `None` if they are not the start of an
/// array.
pub(super) fn dict_length(prefix: &[u8]) -> Option<usize> {
    let length = prefix.get(..PREFIX_BYTES)?.strip_prefix(MAGIC)?;
    Some(usize::from(u16::from_le_bytes(length.try_into().ok()?)))
}

/// Parser of the literals of a dict in a fixed order. It ignores spaces.
pub(super) struct DictParser<'a> {
    rest: &'a [u8],
}

impl<'a> DictParser<'a> {
    pub(super) fn new(text: &'a [u8]) -> Self {
        Self { rest: text }
    }

    fn skip_spaces(&mut self) {
        self.rest = self.rest.trim_ascii_start();
    }

    /// Consumes `literal` if it is next and returns true if so. `literal` must not contain spaces.
    pub(super) fn accept(&mut self, literal: &str) -> bool {
        self.skip_spaces();
        match self.rest.strip_prefix(literal.as_bytes()) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    /// Consumes all of `literals` in order.
    pub(super) fn expect(&mut self, literals: &[&str]) -> Option<()> {
        literals.iter().all(|literal| self.accept(literal)).then_some(())
    }

    /// Parses a number of at most nine digits.
    pub(super) fn number(&mut self) -> Option<usize> {
        self.skip_spaces();
        let digits = self.rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        if digits == 0 || digits > 9 {
            return None;
        }
        let (number, rest) = self.rest.split_at(digits);
        self.rest = rest;
        std::str::from_utf8(number).ok()?.parse().ok()
    }

    /// Parses a tuple of `N` numbers, with an optional trailing comma.
    pub(super) fn tuple<const N: usize>(&mut self) -> Option<[usize; N]> {
        let mut values = [0; N];
        self.expect(&["("])?;
        for (index, value) in values.iter_mut().enumerate() {
            if index > 0 {
                self.expect(&[","])?;
            }
            *value = self.number()?;
        }
        self.accept(",");
        self.expect(&[")"])?;
        Some(values)
    }

    /// Consumes the end of the dict for an array of shape `()`, which must be the end of the text.
    pub(super) fn end_of_scalar(&mut self) -> Option<()> {
        self.expect(&["'fortran_order'", ":", "False", ",", "'shape'", ":", "(", ")"])?;
        self.end()
    }

    /// Consumes the closing brace, which must be the end of the text.
    pub(super) fn end(&mut self) -> Option<()> {
        self.accept(",");
        self.expect(&["}"])?;
        self.skip_spaces();
        self.rest.is_empty().then_some(())
    }
}
