//! A record's bytes in a store: length, checksum, content.

/// A frame's content is no longer; the largest models' vector and counts are a tenth of it.
pub(crate) const MOST: usize = 8 << 20;
/// Length and checksum.
pub(crate) const HEAD: usize = 8;

/// The frame of `content`; `None` where that is too long.
pub(crate) fn framed(content: &[u8]) -> Option<Vec<u8>> {
    let length = u32::try_from(content.len()).ok().filter(|_| content.len() <= MOST)?;
    let mut bytes = Vec::with_capacity(HEAD + content.len());
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&check(length, content).to_le_bytes());
    bytes.extend_from_slice(content);
    Some(bytes)
}

/// Beginning of a stretch of bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FrameRead<'a> {
    /// A whole frame of so many bytes with its content.
    Whole(usize, &'a [u8]),
    /// So many bytes that are no whole frame; behind them there may be others.
    Damaged(usize),
    /// Nothing more can be read: a frame that was not finished, or a length that cannot be.
    End,
}

/// Looks at the frame that `bytes` begin with.
pub(crate) fn read(bytes: &[u8]) -> FrameRead<'_> {
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return FrameRead::End };
    let Some((sum, rest)) = rest.split_first_chunk::<4>() else { return FrameRead::End };
    let length = u32::from_le_bytes(*length);
    let Some(content) = rest.get(..length as usize).filter(|content| content.len() <= MOST) else {
        return FrameRead::End;
    };
    match check(length, content) == u32::from_le_bytes(*sum) {
        true => FrameRead::Whole(HEAD + content.len(), content),
        false => FrameRead::Damaged(HEAD + content.len()),
    }
}

fn check(length: u32, content: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&length.to_le_bytes());
    hasher.update(content);
    hasher.finalize()
}
