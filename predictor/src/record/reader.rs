//! Reader of record files, including damaged ones.

use crate::record::encode::decode_record;
use crate::record::layout::Layout;
use crate::record::npy::{self, DictParser, MAGIC, PREFIX_BYTES};
use crate::record::{ActivationRecord, MAX_RECORD_BYTES, RecordError, RecordHeader};
use std::io::{ErrorKind, Read};
use std::ops::Range;

/// Largest number of reported ranges; further damage extends the last one.
pub const MAX_DAMAGE_REPORTS: usize = 256;
/// Size of one read, in bytes.
const READ_BYTES: usize = 64 << 10;
/// Largest JSON text of a header, in bytes, with a wide margin for 4,096 layers.
const MAX_HEADER_JSON: usize = 1 << 20;
/// Limit of bytes checksummed in vain, per byte of the file: a file of many false record starts must not cost
/// quadratic time.
const MAX_FAILED_CHECKSUM_RATIO: u64 = 16;

/// Byte range without a complete record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DamagedRange {
    /// Range in the file.
    pub bytes: Range<u64>,
    /// True if the range ends the file, as after an interrupted write.
    pub is_tail: bool,
}

impl std::fmt::Display for DamagedRange {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Range { start, end } = self.bytes;
        let what = if self.is_tail { "cut off" } else { "damaged" };
        write!(formatter, "bytes {start} to {end} are {what}, {} bytes skipped", end - start)
    }
}

/// Iterator over the complete records of a stream.
///
/// An item is an error only if the stream fails. Damage is skipped and listed by [`RecordReader::damage`].
pub struct RecordReader<R> {
    source: R,
    header: RecordHeader,
    /// Buffered bytes of the file. Those before `consumed` are done.
    buffer: Vec<u8>,
    consumed: usize,
    /// Position in the file of the window, the unconsumed rest of the buffer.
    position: u64,
    /// End of the last complete record or of the header.
    valid: u64,
    damage: Vec<DamagedRange>,
    failed_checksum_bytes: u64,
    is_finished: bool,
}

impl<R: Read> RecordReader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// The stream fails or does not begin with a header of this format.
    pub fn new(source: R) -> Result<Self, RecordError> {
        let mut reader = Self {
            source,
            header: RecordHeader {
                model: String::new(),
                layers: Vec::new(),
                experts: 0,
                top_k: 0,
                dtype: String::new(),
                tokens: false,
            },
            buffer: Vec::new(),
            consumed: 0,
            position: 0,
            valid: 0,
            damage: Vec::new(),
            failed_checksum_bytes: 0,
            is_finished: false,
        };
        reader.header = reader.read_header()?;
        Ok(reader)
    }

    fn read_header(&mut self) -> Result<RecordHeader, RecordError> {
        let refuse = |message: &str| RecordError::NotRecords(message.to_owned());
        self.fill(PREFIX_BYTES)?;
        let dict =
            npy::dict_length(self.window()).ok_or_else(|| refuse("it does not begin with an array"))?;
        let data = PREFIX_BYTES + dict;
        self.fill(data)?;
        let text =
            self.window().get(PREFIX_BYTES..data).ok_or_else(|| refuse("it ends within its header"))?;
        let length = header_length(text).ok_or_else(|| refuse("its first array is not JSON text"))?;
        if length > MAX_HEADER_JSON {
            return Err(refuse("its header is too long"));
        }
        self.fill(data + length)?;
        let json =
            self.window().get(data..data + length).ok_or_else(|| refuse("it ends within its header"))?;
        let header = RecordHeader::from_json(json)?;
        self.advance(data + length);
        self.valid = self.position;
        Ok(header)
    }

    /// Returns the header.
    pub fn header(&self) -> &RecordHeader {
        &self.header
    }

    /// Returns the ranges skipped so far.
    pub fn damage(&self) -> &[DamagedRange] {
        &self.damage
    }

    /// Returns the end of the last complete record or of the header, in bytes from the start of the file.
    pub fn valid_bytes(&self) -> u64 {
        self.valid
    }

    /// Returns the unconsumed bytes.
    fn window(&self) -> &[u8] {
        self.buffer.get(self.consumed..).unwrap_or_default()
    }

    /// Extends the window to at least `bytes` bytes, unless the stream ends.
    fn fill(&mut self, bytes: usize) -> Result<(), RecordError> {
        while self.window().len() < bytes {
            let missing = bytes - self.window().len();
            let start = self.buffer.len();
            self.buffer.resize(start + READ_BYTES.min(missing.next_multiple_of(4096)), 0);
            let read = self.source.read(self.buffer.get_mut(start..).unwrap_or_default());
            self.buffer.truncate(start + read.as_ref().map_or(0, |read| *read));
            match read {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Consumes the first `bytes` of the window.
    fn advance(&mut self, bytes: usize) {
        self.consumed += bytes;
        self.position += bytes as u64;
        // Drops consumed bytes once they are the larger part, so that few bytes are moved often.
        if self.consumed > self.buffer.len() / 2 {
            self.buffer.drain(..self.consumed);
            self.consumed = 0;
        }
    }

    /// Parses the record at the start of the window and returns it with its length. Returns `None` if there is no
    /// valid one.
    fn parse_record(&mut self) -> Result<Option<(ActivationRecord, usize)>, RecordError> {
        self.fill(PREFIX_BYTES)?;
        let Some(dict) = npy::dict_length(self.window()) else { return Ok(None) };
        self.fill(PREFIX_BYTES + dict)?;
        let Some(text) = self.window().get(PREFIX_BYTES..PREFIX_BYTES + dict) else { return Ok(None) };
        let Some(layout) = Layout::parse(text, &self.header) else { return Ok(None) };
        let Ok(total) = layout.checked_total(PREFIX_BYTES + dict) else { return Ok(None) };
        self.fill(total)?;
        let Some(bytes) = self.window().get(..total) else { return Ok(None) };
        let Some((covered, check)) = bytes.split_last_chunk::<4>() else { return Ok(None) };
        let data = covered.get(PREFIX_BYTES + dict..).unwrap_or_default();
        if crc32fast::hash(covered) != u32::from_le_bytes(*check) {
            self.failed_checksum_bytes += total as u64;
            return Ok(None);
        }
        Ok(decode_record(&layout, &self.header, data).map(|record| (record, total)))
    }

    /// Skips bytes up to the next possible start of an array. Returns true if there is one.
    fn resynchronise(&mut self) -> Result<bool, RecordError> {
        let start = self.position;
        let mut skip = 1;
        let found = loop {
            self.advance(skip.min(self.window().len()));
            self.fill(READ_BYTES.max(MAGIC.len()))?;
            if self.window().len() < MAGIC.len()
                || self.failed_checksum_bytes
                    > MAX_FAILED_CHECKSUM_RATIO * self.position + 4 * MAX_RECORD_BYTES
            {
                break false;
            }
            match find_bytes(self.window(), MAGIC) {
                Some(0) => break true,
                Some(offset) => skip = offset,
                None => skip = self.window().len() - (MAGIC.len() - 1),
            }
        };
        if !found {
            // Skips the rest without buffering it.
            while !self.window().is_empty() {
                self.advance(self.window().len());
                self.fill(READ_BYTES)?;
            }
        }
        self.report_damage(start..self.position);
        Ok(found)
    }

    fn report_damage(&mut self, bytes: Range<u64>) {
        let full = self.damage.len() >= MAX_DAMAGE_REPORTS;
        match self.damage.last_mut() {
            Some(last) if full || last.bytes.end == bytes.start => last.bytes.end = bytes.end,
            _ => self.damage.push(DamagedRange { bytes, is_tail: false }),
        }
    }

    fn advance_to_record(&mut self) -> Result<Option<ActivationRecord>, RecordError> {
        loop {
            if let Some((record, total)) = self.parse_record()? {
                self.advance(total);
                self.valid = self.position;
                return Ok(Some(record));
            }
            if self.window().is_empty() || !self.resynchronise()? {
                break;
            }
        }
        let end = self.position;
        if let Some(last) = self.damage.last_mut().filter(|last| last.bytes.end == end) {
            last.is_tail = true;
        }
        Ok(None)
    }
}

impl<R: Read> Iterator for RecordReader<R> {
    type Item = Result<ActivationRecord, RecordError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_finished {
            return None;
        }
        let item = self.advance_to_record().transpose();
        self.is_finished = !matches!(item, Some(Ok(_)));
        item
    }
}

impl<R> std::fmt::Debug for RecordReader<R> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { header, position, damage, .. } = self;
        formatter
            .debug_struct("Reader")
            .field("header", header)
            .field("position", position)
            .field("damage", damage)
            .finish_non_exhaustive()
    }
}

/// Returns the length that the dict of a header array states.
fn header_length(text: &[u8]) -> Option<usize> {
    let mut dict = DictParser::new(text);
    dict.expect(&["{", "'descr'", ":", "'|u1'", ",", "'fortran_order'", ":", "False", ",", "'shape'", ":"])?;
    let [length] = dict.tuple()?;
    dict.end()?;
    Some(length)
}

fn find_bytes(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

/// Summary of a record file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordFileSummary {
    /// Returns the header.
    pub header: RecordHeader,
    /// Number of complete records.
    pub records: u64,
    /// End of the last complete record, where the next one belongs.
    pub valid_bytes: u64,
    /// Byte range without a complete record.
    pub damage: Vec<DamagedRange>,
}

/// Reads a file without keeping its records.
///
/// # Errors
/// As [`RecordReader::new`], or the stream fails.
pub fn scan(source: impl Read) -> Result<RecordFileSummary, RecordError> {
    let mut reader = RecordReader::new(source)?;
    let mut records = 0;
    for record in reader.by_ref() {
        record?;
        records += 1;
    }
    let valid_bytes = reader.valid_bytes();
    Ok(RecordFileSummary { header: reader.header, records, valid_bytes, damage: reader.damage })
}
