//! Ids of responses, and lists of items as JSON.

/// Largest length of a response's id, in bytes.
pub(crate) const MAX_ID_BYTES: usize = 80;

/// Reports if `id` is a valid id of a response, which is safe as a file name.
pub(super) fn is_id(id: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    id.len() <= MAX_ID_BYTES
        && id.strip_prefix("resp_").is_some_and(|rest| !rest.is_empty() && rest.bytes().all(is_allowed))
}

/// Joins JSON lists, each written without brackets, to one without brackets.
pub(super) fn join(parts: &[&str]) -> String {
    parts.iter().copied().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(",")
}

/// Returns the elements of a JSON list as text without the brackets.
pub(super) fn elements(list: &str) -> Option<&str> {
    Some(list.trim().strip_prefix('[')?.strip_suffix(']')?.trim())
}
