//! Reads record files, damaged ones too.

use crate::record::encode::decode_record;
use crate::record::layout::Layout;
use crate::record::npy::{self, Dict, MAGIC, PREFIX};
use crate::record::{ActivationRecord, MAX_RECORD_BYTES, RecordError, RecordHeader};
use std::io::{ErrorKind, Read};
use std::ops::Range;

/// Damaged ranges that are kept; further ones only extend the last.
pub const MAX_DAMAGE_REPORTS: usize = 256;
/// Bytes that are read at once.
const CHUNK: usize = 64 << 10;
/// Largest JSON text of a header: 4,096 layers fit many times.
const MAX_HEADER_JSON: usize = 1 << 20;
/// Work on apparent records whose checksum fails, in bytes per byte of the file: a file made of
/// false beginnings must not cost quadratic time.
const MAX_FALSE_WORK: u64 = 16;

/// Bytes that are no whole record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Where in the file.
    pub bytes: Range<u64>,
    /// Set if the file ends here: a write that was cut short.
    pub tail: bool,
}

impl std::fmt::Display for Damage {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Range { start, end } = self.bytes;
        let what = if self.tail { "cut off" } else { "damaged" };
        write!(formatter, "bytes {start} to {end} are {what}, {} bytes skipped", end - start)
    }
}

/// Iterates over the whole records of a stream, from its beginning.
///
/// An item is an error only where the stream itself fails; damage is skipped and listed by
/// [`Reader::damage`].
pub struct Reader<R> {
    source: R,
    header: RecordHeader,
    /// Bytes of the file that have been read; those before `passed` are done with.
    buffer: Vec<u8>,
    passed: usize,
    /// Where the window, the rest of the buffer, starts in the file.
    position: u64,
    /// End of the last whole record, or of the header.
    valid: u64,
    damage: Vec<Damage>,
    false_work: u64,
    ended: bool,
}

impl<R: Read> Reader<R> {
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
            passed: 0,
            position: 0,
            valid: 0,
            damage: Vec::new(),
            false_work: 0,
            ended: false,
        };
        reader.header = reader.read_header()?;
        Ok(reader)
    }

    fn read_header(&mut self) -> Result<RecordHeader, RecordError> {
        let refuse = |message: &str| RecordError::NotRecords(message.to_owned());
        self.fill(PREFIX)?;
        let dict =
            npy::dict_length(self.window()).ok_or_else(|| refuse("it does not begin with an array"))?;
        let data = PREFIX + dict;
        self.fill(data)?;
        let text = self.window().get(PREFIX..data).ok_or_else(|| refuse("it ends within its header"))?;
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

    /// Model and form of the records.
    pub fn header(&self) -> &RecordHeader {
        &self.header
    }

    /// Returns the bytes skipped so far; complete when the iteration has ended.
    pub fn damage(&self) -> &[Damage] {
        &self.damage
    }

    /// End of the last whole record so far, or of the header, in bytes from the start.
    pub fn valid_bytes(&self) -> u64 {
        self.valid
    }

    /// Returns the bytes that have been read and not yet passed.
    fn window(&self) -> &[u8] {
        self.buffer.get(self.passed..).unwrap_or_default()
    }

    /// Makes the window at least `bytes` long where the stream has them.
    fn fill(&mut self, bytes: usize) -> Result<(), RecordError> {
        while self.window().len() < bytes {
            let missing = bytes - self.window().len();
            let start = self.buffer.len();
            self.buffer.resize(start + CHUNK.min(missing.next_multiple_of(4096)), 0);
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

    /// Passes the first `bytes` of the window.
    fn advance(&mut self, bytes: usize) {
        self.passed += bytes;
        self.position += bytes as u64;
        // What is passed is dropped when it is the larger part, so that no byte moves often.
        if self.passed > self.buffer.len() / 2 {
            self.buffer.drain(..self.passed);
            self.passed = 0;
        }
    }

    /// The record at the start of the window with its length; `None` where there is none.
    fn record_here(&mut self) -> Result<Option<(ActivationRecord, usize)>, RecordError> {
        self.fill(PREFIX)?;
        let Some(dict) = npy::dict_length(self.window()) else { return Ok(None) };
        self.fill(PREFIX + dict)?;
        let Some(text) = self.window().get(PREFIX..PREFIX + dict) else { return Ok(None) };
        let Some(layout) = Layout::parse(text, &self.header) else { return Ok(None) };
        let Ok(total) = layout.checked_total(PREFIX + dict) else { return Ok(None) };
        self.fill(total)?;
        let Some(bytes) = self.window().get(..total) else { return Ok(None) };
        let Some((covered, check)) = bytes.split_last_chunk::<4>() else { return Ok(None) };
        let data = covered.get(PREFIX + dict..).unwrap_or_default();
        if crc32fast::hash(covered) != u32::from_le_bytes(*check) {
            self.false_work += total as u64;
            return Ok(None);
        }
        Ok(decode_record(&layout, &self.header, data).map(|record| (record, total)))
    }

    /// Passes bytes until another array may begin. Returns whether one does.
    fn resynchronise(&mut self) -> Result<bool, RecordError> {
        let start = self.position;
        let mut skip = 1;
        let found = loop {
            self.advance(skip.min(self.window().len()));
            self.fill(CHUNK.max(MAGIC.len()))?;
            if self.window().len() < MAGIC.len()
                || self.false_work > MAX_FALSE_WORK * self.position + 4 * MAX_RECORD_BYTES
            {
                break false;
            }
            match find(self.window(), MAGIC) {
                Some(0) => break true,
                Some(offset) => skip = offset,
                None => skip = self.window().len() - (MAGIC.len() - 1),
            }
        };
        if !found {
            // Nothing more can be found: pass the rest without holding it.
            while !self.window().is_empty() {
                self.advance(self.window().len());
                self.fill(CHUNK)?;
            }
        }
        self.report(start..self.position);
        Ok(found)
    }

    fn report(&mut self, bytes: Range<u64>) {
        let full = self.damage.len() >= MAX_DAMAGE_REPORTS;
        match self.damage.last_mut() {
            Some(last) if full || last.bytes.end == bytes.start => last.bytes.end = bytes.end,
            _ => self.damage.push(Damage { bytes, tail: false }),
        }
    }

    fn advance_to_record(&mut self) -> Result<Option<ActivationRecord>, RecordError> {
        loop {
            if let Some((record, total)) = self.record_here()? {
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
            last.tail = true;
        }
        Ok(None)
    }
}

impl<R: Read> Iterator for Reader<R> {
    type Item = Result<ActivationRecord, RecordError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let item = self.advance_to_record().transpose();
        self.ended = !matches!(item, Some(Ok(_)));
        item
    }
}

impl<R> std::fmt::Debug for Reader<R> {
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

/// The length that the dict of a header array states.
fn header_length(text: &[u8]) -> Option<usize> {
    let mut dict = Dict::new(text);
    dict.expect(&["{", "'descr'", ":", "'|u1'", ",", "'fortran_order'", ":", "False", ",", "'shape'", ":"])?;
    let [length] = dict.tuple()?;
    dict.end()?;
    Some(length)
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

/// Contents of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scan {
    /// Model and form of the records.
    pub header: RecordHeader,
    /// Whole records.
    pub records: u64,
    /// Where the next record belongs: the end of the last whole one.
    pub valid_bytes: u64,
    /// Bytes that are no whole record.
    pub damage: Vec<Damage>,
}

/// Looks through a file without keeping its records.
///
/// # Errors
/// As [`Reader::new`], and where the stream fails.
pub fn scan(source: impl Read) -> Result<Scan, RecordError> {
    let mut reader = Reader::new(source)?;
    let mut records = 0;
    for record in reader.by_ref() {
        record?;
        records += 1;
    }
    let valid_bytes = reader.valid_bytes();
    Ok(Scan { header: reader.header, records, valid_bytes, damage: reader.damage })
}
