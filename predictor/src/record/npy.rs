//! The envelope of one `.npy` array: magic, version 1.0, a padded Python dict.
//!
//! Form: `numpy.lib.format`, version 1.0. Only C order is written and read.

/// Beginning of every array: the magic and version 1.0.
pub(super) const MAGIC: &[u8; 8] = b"\x93NUMPY\x01\x00";
/// Bytes before the dict: the magic and the dict's length, 16 bits little-endian.
pub(super) const PREFIX: usize = 10;
/// The data begins at a multiple of this, so that a mapped file is aligned.
const ALIGNMENT: usize = 64;

/// The envelope of an array whose type is written `descr` (a Python literal) and shape `shape`.
pub(super) fn envelope(descr: &str, shape: &str) -> Vec<u8> {
    let dict = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}");
    let total = (PREFIX + dict.len() + 1).next_multiple_of(ALIGNMENT);
    // The longest dict (all fields, every number of ten digits) stays far below 16 bits.
    let length = u16::try_from(total - PREFIX).unwrap_or(u16::MAX);
    let mut bytes = Vec::with_capacity(total);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(dict.as_bytes());
    bytes.resize(total - 1, b' ');
    bytes.push(b'\n');
    bytes
}

/// Length of the dict, from the first [`PREFIX`] bytes; `None`: no array begins here.
pub(super) fn dict_length(prefix: &[u8]) -> Option<usize> {
    let length = prefix.get(..PREFIX)?.strip_prefix(MAGIC)?;
    Some(usize::from(u16::from_le_bytes(length.try_into().ok()?)))
}

/// Reads the literals of a dict in order, blind to the spaces between them.
pub(super) struct Dict<'a> {
    rest: &'a [u8],
}

impl<'a> Dict<'a> {
    pub(super) fn new(text: &'a [u8]) -> Self {
        Self { rest: text }
    }

    fn skip_spaces(&mut self) {
        self.rest = self.rest.trim_ascii_start();
    }

    /// Reports if `literal` comes next; passes it if so. Spaces within `literal` are not allowed.
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

    /// All of `literals`, one after another.
    pub(super) fn expect(&mut self, literals: &[&str]) -> Option<()> {
        literals.iter().all(|literal| self.accept(literal)).then_some(())
    }

    /// A number of at most nine digits.
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

    /// A tuple of `N` numbers; a comma after the last is allowed.
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

    /// The end of the dict for an array of shape `()`, and nothing behind it.
    pub(super) fn end_of_scalar(&mut self) -> Option<()> {
        self.expect(&["'fortran_order'", ":", "False", ",", "'shape'", ":", "(", ")"])?;
        self.end()
    }

    /// The closing brace, and nothing behind it.
    pub(super) fn end(&mut self) -> Option<()> {
        self.accept(",");
        self.expect(&["}"])?;
        self.skip_spaces();
        self.rest.is_empty().then_some(())
    }
}
