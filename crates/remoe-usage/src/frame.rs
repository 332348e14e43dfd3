//! Framing of a record in a history file: length (4 bytes), CRC-32 (4 bytes), content.

/// Largest content of a frame, in bytes. The vector and shares of the largest models take a tenth of it.
pub(crate) const MAX_CONTENT_BYTES: usize = 8 << 20;
/// Bytes of the length and the checksum.
pub(crate) const HEADER_BYTES: usize = 8;

/// Encodes `content` as a frame. Returns `None` if it is too long.
pub(crate) fn encode_frame(content: &[u8]) -> Option<Vec<u8>> {
    let length = u32::try_from(content.len()).ok().filter(|_| content.len() <= MAX_CONTENT_BYTES)?;
    let mut bytes = Vec::with_capacity(HEADER_BYTES + content.len());
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&checksum(length, content).to_le_bytes());
    bytes.extend_from_slice(content);
    Some(bytes)
}

/// First frame of a byte sequence.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FrameRead<'a> {
    /// A complete frame: its length in bytes and its content.
    Whole(usize, &'a [u8]),
    /// A frame with a wrong checksum and its length in bytes. Further frames may follow.
    Damaged(usize),
    /// No complete frame: it is unfinished, or its length is invalid.
    End,
}

/// Decodes the frame at the start of `bytes`.
pub(crate) fn decode_frame(bytes: &[u8]) -> FrameRead<'_> {
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return FrameRead::End };
    let Some((stored_checksum, rest)) = rest.split_first_chunk::<4>() else { return FrameRead::End };
    let length = u32::from_le_bytes(*length);
    let Some(content) = rest.get(..length as usize).filter(|content| content.len() <= MAX_CONTENT_BYTES)
    else {
        return FrameRead::End;
    };
    match checksum(length, content) == u32::from_le_bytes(*stored_checksum) {
        true => FrameRead::Whole(HEADER_BYTES + content.len(), content),
        false => FrameRead::Damaged(HEADER_BYTES + content.len()),
    }
}

fn checksum(length: u32, content: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&length.to_le_bytes());
    hasher.update(content);
    hasher.finalize()
}
