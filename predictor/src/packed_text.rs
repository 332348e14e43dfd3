//! Short text form of bytes: Huffman-coded, in base64. In counts and levels, single values repeat but sequences do
//! not, so that a search for matches would only cost space.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use miniz_oxide::deflate::core::{
    CompressionStrategy, CompressorOxide, TDEFLFlush, compress_to_output, create_comp_flags_from_zip_params,
};
use miniz_oxide::inflate::decompress_to_vec_with_limit;

/// Window bits of a raw deflate stream, without zlib's header and checksum.
const RAW_DEFLATE: i32 = -15;

/// Compresses bytes and encodes them in base64.
pub(crate) fn pack(bytes: &[u8]) -> String {
    let huffman = CompressionStrategy::HuffmanOnly as i32;
    let mut compressor = CompressorOxide::new(create_comp_flags_from_zip_params(1, RAW_DEFLATE, huffman));
    let mut packed = Vec::new();
    compress_to_output(&mut compressor, bytes, TDEFLFlush::Finish, |part| {
        packed.extend_from_slice(part);
        true
    });
    STANDARD_NO_PAD.encode(packed)
}

/// Decodes a text from [`pack`]. Returns `None` if it is invalid or decodes to more than `limit` bytes: a short text
/// can claim gigabytes.
pub(crate) fn unpack(text: &str, limit: usize) -> Option<Vec<u8>> {
    let packed = STANDARD_NO_PAD.decode(text).ok()?;
    decompress_to_vec_with_limit(&packed, limit).ok()
}
