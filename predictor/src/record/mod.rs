//! File format of activation records: the expert usage of each request.
//!
//! A record file is a stream of NumPy `.npy` arrays (format version 1.0), so that Python reads it
//! with NumPy alone:
//!
//! ```python
//! import io, json, numpy as np
//! with open("history.npy", "rb") as f:
//!     header = json.loads(np.load(f).tobytes())
//!     records = [np.load(f) for _ in iter(lambda: f.peek(1), b"")]
//! records[0]["prefill"]  # counts [layers, experts] of the first request
//! ```
//!
//! # The arrays
//!
//! The first array is `|u1 (n,)`: the JSON text of a [`RecordHeader`]. Each further array is a record, a structured
//! scalar (shape `()`) with these fields, little-endian and packed:
//!
//! | field | type | content |
//! | --- | --- | --- |
//! | `steps` | `<u4` | decode steps: forwards of one token after the prefill |
//! | `prompt` | `<u4 (n,)` | token ids of the prompt, `n` >= 1 |
//! | `prefill` | `<u2` or `<u4` `(L, K)` | assignments of prompt tokens to each expert of each layer |
//! | `decode` | `<u2` or `<u4` `(L, K)` | the same for the decode steps |
//! | `experts` | `\|u1` or `<u2` `(L, n + steps, top_k)` | the experts of every token; present if the header says `"tokens": true` |
//! | `check` | `<u4` | CRC-32 (zlib's) of every byte of this array before it, its `.npy` header included |
//!
//! Counts of a field take two bytes if all fit, expert ids one byte up to 256 experts.
//!
//!
//! # Crashes, mistakes and attacks
//!
//! Each record is one `write`. After a crash, the length and the checksum reveal an incomplete record, and the next
//! writer truncates it ([`resume_position`]). [`RecordReader`] returns every complete record and reports the byte ranges
//! that it skipped. A file of another model is rejected with the field that differs.
//!
//! A record has at most [`MAX_RECORD_BYTES`], a file at most the limit of its writer, by default
//! [`DEFAULT_FILE_BYTES`]. A reader holds one record at a time and allocates only for bytes that exist.

mod encode;
mod error;
mod header;
mod layout;
mod merge;
mod npy;
mod reader;
mod writer;

pub use encode::{ActivationRecord, encode_header, encode_record};
pub use error::RecordError;
pub use header::RecordHeader;
pub use merge::{MergeSummary, merge};
pub use reader::{DamagedRange, MAX_DAMAGE_REPORTS, RecordFileSummary, RecordReader, scan};
pub use writer::{RecordWriter, resume_position};

/// Largest record in the file, in bytes: 64 MiB are enough for the expert ids of 8,192 tokens in every known model.
pub const MAX_RECORD_BYTES: u64 = 64 << 20;

/// Default limit of a record file, in bytes: 4 GiB.
pub const DEFAULT_FILE_BYTES: u64 = 4 << 30;
