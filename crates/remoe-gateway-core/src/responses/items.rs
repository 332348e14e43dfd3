//! Ids of responses, and lists of items as JSON.

/// Longest id of a response in bytes.
pub(crate) const ID: usize = 80;

/// Returns whether `id` is the id of a response, and so a safe name of a file.
pub(super) fn is_id(id: &str) -> bool {
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    id.len() <= ID
        && id.strip_prefix("resp_").is_some_and(|rest| !rest.is_empty() && rest.bytes().all(letter))
}

/// Joins the elements of JSON lists that are written without their brackets.
pub(super) fn join(parts: &[&str]) -> String {
    parts.iter().copied().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(",")
}

/// Returns the elements of a list of JSON, without its brackets.
pub(super) fn elements(list: &str) -> Option<&str> {
    Some(list.trim().strip_prefix('[')?.strip_suffix(']')?.trim())
}
