//! Activation records: what a model's experts did for each request, as a file.
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
//! The first is `|u1 (n,)`: the JSON text of a [`RecordHeader`]. Every further one is a record, a
//! structured scalar (shape `()`) with these fields, little-endian and packed:
//!
//! | field | type | what it holds |
//! | --- | --- | --- |
//! | `steps` | `<u4` | decode steps: forwards of one token after the prefill |
//! | `prompt` | `<u4 (n,)` | token ids of the prompt, `n` >= 1 |
//! | `prefill` | `<u2` or `<u4` `(L, K)` | assignments of prompt tokens to each expert of each layer |
//! | `decode` | `<u2` or `<u4` `(L, K)` | the same for the decode steps |
//! | `experts` | `\|u1` or `<u2` `(L, n + steps, top_k)` | the experts of every token; only where the header says `"tokens": true` |
//! | `check` | `<u4` | CRC-32 (zlib's) of every byte of this array before it, its `.npy` header included |
//!
//! Counts take two bytes where all of a field fit, expert ids one byte up to 256 experts.
//!
//! # What a crash, a mistake and an attacker can do
//!
//! A record is one `write`; what a crash leaves half written is found by length and checksum, and cut
//! off by the next writer ([`resume_position`]). [`Reader`] returns every whole record and says which
//! byte ranges it had to skip. A file of another model is refused by name. A record is at most
//! [`MAX_RECORD_BYTES`], a file at most what its writer allows, [`DEFAULT_FILE_BYTES`] unless told
//! otherwise; a reader holds one record at a time and allocates only for bytes that are there.

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
pub use merge::{Merged, merge};
pub use reader::{Damage, MAX_DAMAGE_REPORTS, Reader, Scan, scan};
pub use writer::{RecordWriter, resume_position};

/// Largest record, in bytes of the file: 64 MiB, per-token expert ids of 8,192 tokens included for
/// every model there is.
pub const MAX_RECORD_BYTES: u64 = 64 << 20;

/// Largest record file that a writer makes when it is not told otherwise: 4 GiB.
pub const DEFAULT_FILE_BYTES: u64 = 4 << 30;
