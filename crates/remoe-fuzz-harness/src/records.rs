//! Target: files of activation records.
//!
//! Input: a mode byte and the bytes of a file. An odd mode corrects the checksums first, because a reader skips records
//! with a wrong one.

use crate::{check_error, memory};
use remoe_predictor::record::{
    ActivationRecord, DEFAULT_FILE_BYTES, RecordHeader, RecordReader, RecordWriter, encode_header,
    encode_record, merge, resume_position, scan,
};

/// First bytes of every NumPy array.
const MAGIC: &[u8] = b"\x93NUMPY";
/// Fixed part of the memory limit: the first chunk, and the parsed header.
const BASE_BYTES: usize = 1 << 20;
/// Memory limit per byte: a count of one byte becomes a `u32`, the buffer doubles, and the target keeps all records.
const BYTES_PER_INPUT_BYTE: usize = 64;

pub fn run(data: &[u8]) {
    let Some((&mode, file)) = data.split_first() else {
        return;
    };
    let mut file = file.to_vec();
    if mode % 2 == 1 {
        correct_checksums(&mut file);
    }
    memory::with_limit(BASE_BYTES + BYTES_PER_INPUT_BYTE * file.len(), || read(&file));
}

fn read(file: &[u8]) {
    let mut reader = match RecordReader::new(file) {
        Ok(reader) => reader,
        Err(error) => return check_error(&error.to_string()),
    };
    let header = reader.header().clone();
    header.check().expect("a header that is accepted describes a model");
    let records: Vec<ActivationRecord> =
        reader.by_ref().map(|record| record.expect("a slice does not fail")).collect();
    for record in &records {
        check_record(&header, record);
    }
    let mut damage_end = 0;
    for damage in reader.damage() {
        assert!(damage_end <= damage.bytes.start && damage.bytes.start < damage.bytes.end);
        damage_end = damage.bytes.end;
    }
    assert!(damage_end <= file.len() as u64 && reader.valid_bytes() <= file.len() as u64);
    assert_eq!(scan(file).expect("it was read").records, records.len() as u64);

    // A writer that resumes the file truncates the damaged end. A reader can read the result.
    let position = resume_position(file, &header).expect("it is of this model");
    let kept_part = file[..position as usize].to_vec();
    let mut writer =
        RecordWriter::new(kept_part, header.clone(), position, DEFAULT_FILE_BYTES).expect("it can go on");
    records.iter().take(1).for_each(|record| writer.append(record).expect("it has the form"));
    let resumed = scan(&*writer.finish().expect("a vector can be flushed")).expect("it is a file");
    assert_eq!(resumed.records, (records.len() + records.len().min(1)) as u64);
    let mut whole = Vec::new();
    let merged = merge([file], &mut whole, DEFAULT_FILE_BYTES).expect("it is of one model");
    let merged_reader = RecordReader::new(&*whole).expect("it was written");
    assert_eq!(merged.bytes, whole.len() as u64);
    assert!(merged_reader.map(|record| record.expect("a slice does not fail")).eq(records));
}

/// Asserts that a record has the sizes in its header.
fn check_record(header: &RecordHeader, record: &ActivationRecord) {
    assert!(!record.prompt.is_empty());
    assert_eq!((record.prefill.len(), record.decode.len()), (header.cells(), header.cells()));
    let tokens = record.prompt.len() + record.steps as usize;
    let experts = record.experts.as_ref().map(Vec::len);
    let wanted = header.tokens.then_some(header.layers.len() * tokens * header.top_k as usize);
    assert_eq!(experts, wanted);
}

/// Writes the correct checksum at the end of each array except the first.
fn correct_checksums(file: &mut [u8]) {
    let starts: Vec<usize> =
        (0..file.len()).filter(|&at| file[at..].starts_with(MAGIC)).chain([file.len()]).collect();
    for pair in starts.windows(2).skip(1) {
        let array = &mut file[pair[0]..pair[1]];
        if let Some((content, check)) = array.split_last_chunk_mut::<4>() {
            *check = crc32fast::hash(content).to_le_bytes();
        }
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for (layers, experts, top_k, tokens) in [(1_u32, 2_u32, 1_u32, false), (3, 4, 2, true), (1, 300, 2, true)]
    {
        let header = RecordHeader {
            model: "ab".repeat(8),
            layers: (0..layers).map(|layer| 2 * layer).collect(),
            experts,
            top_k,
            dtype: "bfloat16".to_owned(),
            tokens,
        };
        let record = |prompt: u32, steps: u32, count: u32| {
            let cells = header.cells();
            let routes = layers * (prompt + steps) * top_k;
            ActivationRecord {
                prompt: (0..prompt).collect(),
                prefill: vec![count; cells],
                decode: vec![0; cells],
                steps,
                experts: tokens.then(|| (0..routes).map(|n| (n % top_k) as u16).collect()),
            }
        };
        let mut file = encode_header(&header).expect("it describes a model");
        seeds.push([&[0], &*file].concat());
        // Records with counts of two bytes and of four bytes.
        for record in [record(3, 0, 1), record(1, 2, 70_000), record(5, 1, 7)] {
            if let Ok(bytes) = encode_record(&header, &record) {
                file.extend(bytes);
            }
        }
        for mode in [0, 1] {
            seeds.push([&[mode], &*file].concat());
            seeds.push([&[mode], &file[..file.len() - 3]].concat());
            let mut damaged = file.clone();
            let middle = damaged.len() * 2 / 3;
            damaged[middle] ^= 0x55;
            seeds.push([&[mode], &*damaged].concat());
        }
    }
    seeds
}
