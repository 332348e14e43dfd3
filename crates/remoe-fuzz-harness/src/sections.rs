//! Inputs of several files: sections between bytes that stand in no JSON and no template.

/// Ends a section.
const MARK: u8 = 0;

/// The first `N` sections, empty where there are fewer, and the rest.
pub(crate) fn split<const N: usize>(data: &[u8]) -> ([&[u8]; N], &[u8]) {
    let mut rest = data;
    let sections = std::array::from_fn(|_| {
        let end = rest.iter().position(|byte| *byte == MARK).unwrap_or(rest.len());
        let (section, after) = rest.split_at(end);
        rest = after.get(1..).unwrap_or_default();
        section
    });
    (sections, rest)
}

/// An input of these sections.
pub(crate) fn join(sections: &[&[u8]]) -> Vec<u8> {
    sections.join(&MARK)
}
