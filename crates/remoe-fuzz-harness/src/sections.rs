//! Inputs of several files: sections that are separated by zero bytes, which JSON and templates do not contain.

/// Byte that separates sections.
const SEPARATOR: u8 = 0;

/// Splits off the first `N` sections, and returns the rest too. Missing sections are empty.
pub(crate) fn split<const N: usize>(data: &[u8]) -> ([&[u8]; N], &[u8]) {
    let mut rest = data;
    let sections = std::array::from_fn(|_| {
        let end = rest.iter().position(|byte| *byte == SEPARATOR).unwrap_or(rest.len());
        let (section, after) = rest.split_at(end);
        rest = after.get(1..).unwrap_or_default();
        section
    });
    (sections, rest)
}

/// Joins sections into an input.
pub(crate) fn join(sections: &[&[u8]]) -> Vec<u8> {
    sections.join(&SEPARATOR)
}
