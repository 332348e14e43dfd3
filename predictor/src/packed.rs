//! Bytes as a short text: Huffman-coded, in base64. What counts and levels repeat is which values are frequent, not
//! sequences of them, which a search for would only cost room.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use miniz_oxide::deflate::core::{
    CompressionStrategy, CompressorOxide, TDEFLFlush, compress_to_output, create_comp_flags_from_zip_params,
};
use miniz_oxide::inflate::decompress_to_vec_with_limit;

/// Neither zlib's header nor its checksum.
const RAW: i32 = -15;

pub(crate) fn pack(bytes: &[u8]) -> String {
    let huffman = CompressionStrategy::HuffmanOnly as i32;
    let mut compressor = CompressorOxide::new(create_comp_flags_from_zip_params(1, RAW, huffman));
    let mut packed = Vec::new();
    compress_to_output(&mut compressor, bytes, TDEFLFlush::Finish, |part| {
        packed.extend_from_slice(part);
        true
    });
    STANDARD_NO_PAD.encode(packed)
}

/// Reverses [`pack`]; `None` if `text` is not in its form, or holds more than `most` bytes: a short text may claim to
/// be gigabytes.
pub(crate) fn unpack(text: &str, most: usize) -> Option<Vec<u8>> {
    let packed = STANDARD_NO_PAD.decode(text).ok()?;
    decompress_to_vec_with_limit(&packed, most).ok()
}
