//! Record files: round trips, crashes, damage, other models, hostile bytes.

use proptest::collection::vec;
use proptest::prelude::*;
use remoe_predictor::record::{
    ActivationRecord, DEFAULT_FILE_BYTES, MAX_RECORD_BYTES, RecordError, RecordHeader, RecordReader,
    RecordWriter, encode_header, encode_record, merge, resume_position, scan,
};

fn header(layers: u32, experts: u32, top_k: u32, tokens: bool) -> RecordHeader {
    RecordHeader {
        model: "0123456789abcdef".repeat(4),
        layers: (1..=layers).collect(),
        experts,
        top_k,
        dtype: "bfloat16".to_owned(),
        tokens,
    }
}

/// Creates a record with counts from `seed`.
fn record(header: &RecordHeader, prompt: Vec<u32>, steps: u32, seed: u32) -> ActivationRecord {
    let cells = header.cells() as u32;
    let count = |cell: u32| (cell.wrapping_mul(2_654_435_761).wrapping_add(seed)) % 70_000;
    let ids = (prompt.len() + steps as usize) * header.layers.len() * header.top_k as usize;
    ActivationRecord {
        prompt,
        prefill: (0..cells).map(count).collect(),
        decode: (0..cells).map(|cell| count(cell) % 9).collect(),
        steps,
        experts: header.tokens.then(|| (0..ids).map(|id| (id as u32 % header.experts) as u16).collect()),
    }
}

fn file(header: &RecordHeader, records: &[ActivationRecord]) -> Vec<u8> {
    let mut writer = RecordWriter::new(Vec::new(), header.clone(), 0, DEFAULT_FILE_BYTES).unwrap();
    records.iter().for_each(|record| writer.append(record).unwrap());
    writer.finish().unwrap()
}

fn read(bytes: &[u8]) -> (Vec<ActivationRecord>, Vec<remoe_predictor::record::DamagedRange>) {
    let mut reader = RecordReader::new(bytes).unwrap();
    let records = reader.by_ref().map(Result::unwrap).collect();
    (records, reader.damage().to_vec())
}

fn three() -> (RecordHeader, Vec<ActivationRecord>) {
    let header = header(3, 8, 2, false);
    let records = (1..4).map(|n| record(&header, (0..10 * n).collect(), n, n)).collect();
    (header, records)
}

proptest! {
    #[test]
    fn what_is_written_is_read(
        layers in 1..5_u32, experts in prop_oneof![Just(4_u32), Just(256), Just(300)], tokens: bool,
        prompts in vec((vec(any::<u32>(), 1..40), 0..5_u32, any::<u32>()), 0..5),
    ) {
        let header = header(layers, experts, 3, tokens);
        let records: Vec<_> =
            prompts.into_iter().map(|(prompt, steps, seed)| record(&header, prompt, steps, seed)).collect();
        let bytes = file(&header, &records);
        let reader = RecordReader::new(bytes.as_slice()).unwrap();
        prop_assert_eq!(reader.header(), &header);
        let (found, damage) = read(&bytes);
        prop_assert_eq!(found, records);
        prop_assert_eq!(damage, vec![]);
    }

    #[test]
    fn truncated_file_keeps_its_complete_records(cut in 0.0..1.0_f64) {
        let (header, records) = three();
        let bytes = file(&header, &records);
        let start = encode_header(&header).unwrap().len();
        let cut = start + ((bytes.len() - start) as f64 * cut) as usize;
        let mut ends = vec![start];
        ends.extend(records.iter().scan(start, |end, record| {
            *end += encode_record(&header, record).unwrap().len();
            Some(*end)
        }));
        let whole = ends.iter().filter(|&&end| end <= cut).count() - 1;
        let (found, damage) = read(&bytes[..cut]);
        prop_assert_eq!(&found, &records[..whole]);
        let lost = ends[whole] as u64..cut as u64;
        if lost.is_empty() {
            prop_assert_eq!(damage, vec![]);
        } else {
            prop_assert_eq!(damage.len(), 1);
            prop_assert!(damage[0].is_tail);
            prop_assert_eq!(&damage[0].bytes, &lost);
        }
        // Resuming leaves no trace of the crash.
        let position = resume_position(&bytes[..cut], &header).unwrap();
        prop_assert_eq!(position, ends[whole] as u64);
        let mut kept = bytes[..position as usize].to_vec();
        let mut writer = RecordWriter::new(&mut kept, header.clone(), position, DEFAULT_FILE_BYTES).unwrap();
        records[whole..].iter().for_each(|record| writer.append(record).unwrap());
        prop_assert_eq!(kept, bytes);
    }

    #[test]
    fn changed_bytes_never_pass_for_a_record(
        changes in vec((0.0..1.0_f64, any::<u8>()), 1..20), shift in 0..3_usize, tokens: bool,
    ) {
        let header = header(3, 8, 2, tokens);
        let records: Vec<_> = (1..5).map(|n| record(&header, (0..10 * n).collect(), n, n)).collect();
        let mut bytes = file(&header, &records);
        for (place, value) in changes {
            let at = (bytes.len() as f64 * place) as usize;
            match shift {
                0 => bytes[at] = value,
                1 => bytes.insert(at, value),
                _ => { bytes.remove(at); }
            }
        }
        if let Ok(mut reader) = RecordReader::new(bytes.as_slice()) {
            let same = reader.header() == &header;
            let found: Vec<_> = reader.by_ref().map(Result::unwrap).collect();
            let kept: u64 = found.iter().map(|r| encode_record(reader.header(), r).unwrap().len() as u64).sum();
            let lost: u64 = reader.damage().iter().map(|d| d.bytes.end - d.bytes.start).sum();
            // Every byte is accounted for, and every returned record was written.
            let start = bytes.len() as u64 - kept - lost;
            prop_assert!(start <= bytes.len() as u64);
            if same {
                prop_assert!(found.iter().all(|record| records.contains(record)));
                prop_assert_eq!(start, encode_header(&header).unwrap().len() as u64);
            }
        }
    }

    #[test]
    fn arbitrary_bytes_are_refused_or_skipped(mut bytes in vec(any::<u8>(), 0..3000), framed: bool) {
        if framed {
            let mut whole = encode_header(&header(2, 4, 1, true)).unwrap();
            whole.append(&mut bytes);
            bytes = whole;
        }
        if let Ok(scan) = scan(bytes.as_slice()) {
            prop_assert_eq!(scan.records, 0);
        }
    }
}

#[test]
fn damaged_record_is_skipped_alone() {
    let (header, records) = three();
    let mut bytes = file(&header, &records);
    let start = encode_header(&header).unwrap().len();
    let length = encode_record(&header, &records[0]).unwrap().len();
    let second = encode_record(&header, &records[1]).unwrap().len();
    bytes[start + length + 200] ^= 1;
    let (found, damage) = read(&bytes);
    assert_eq!(found, [records[0].clone(), records[2].clone()]);
    assert_eq!(damage.len(), 1);
    assert_eq!(damage[0].bytes, (start + length) as u64..(start + length + second) as u64);
    assert!(!damage[0].is_tail);
    assert!(damage[0].to_string().contains("damaged"));
    // The next record is appended after the last complete one.
    assert_eq!(resume_position(bytes.as_slice(), &header).unwrap(), bytes.len() as u64);
}

#[test]
fn another_model_is_refused_by_name() {
    let (header, records) = three();
    let bytes = file(&header, &records);
    let mut other = header.clone();
    other.model = "ff".repeat(32);
    let error = resume_position(bytes.as_slice(), &other).unwrap_err();
    let RecordError::OtherModel { field: "model", expected, found } = &error else { panic!("{error}") };
    assert!(expected.contains("ffff") && found.contains("0123"));
    let joined = merge([bytes.as_slice(), &file(&other, &[])], Vec::new(), DEFAULT_FILE_BYTES);
    assert!(matches!(joined, Err(RecordError::OtherModel { field: "model", .. })));
    for (field, change) in [
        ("layers", (|h| h.layers[0] = 0) as fn(&mut RecordHeader)),
        ("(experts, top_k)", |h| h.experts = 9),
        ("(experts, top_k)", |h| h.top_k = 1),
        ("dtype", |h| h.dtype = "float32".to_owned()),
        ("tokens", |h| h.tokens = true),
    ] {
        let mut other = header.clone();
        change(&mut other);
        let error = header.require_same(&other).unwrap_err();
        assert!(matches!(error, RecordError::OtherModel { field: f, .. } if f == field), "{error}");
    }
    // The message truncates the field.
    let many = RecordHeader { layers: (0..4000).collect(), ..header.clone() };
    assert!(header.require_same(&many).unwrap_err().to_string().len() < 2048);
}

#[test]
fn files_merge_in_order_and_damage_is_named() {
    let (header, records) = three();
    let whole = file(&header, &records[..2]);
    let mut cut = file(&header, &records);
    cut.truncate(cut.len() - 5);
    let mut target = Vec::new();
    let merged = merge([whole.as_slice(), &cut], &mut target, DEFAULT_FILE_BYTES).unwrap();
    assert_eq!((merged.records, merged.bytes), (4, target.len() as u64));
    assert_eq!((merged.damage[0].len(), merged.damage[1].len()), (0, 1));
    let expected = [&records[..2], &records[..2]].concat();
    assert_eq!(read(&target).0, expected);
    let none: [&[u8]; 0] = [];
    assert!(merge(none, Vec::new(), DEFAULT_FILE_BYTES).is_err());
}

#[test]
fn limits_hold_before_anything_is_written() {
    let (header, records) = three();
    let room = encode_header(&header).unwrap().len() + encode_record(&header, &records[0]).unwrap().len();
    let mut writer = RecordWriter::new(Vec::new(), header.clone(), 0, room as u64).unwrap();
    writer.append(&records[0]).unwrap();
    let error = writer.append(&records[0]).unwrap_err();
    assert!(matches!(error, RecordError::TooLarge { what: "the record file", .. }), "{error}");
    assert_eq!(writer.bytes(), room as u64);
    assert_eq!(writer.finish().unwrap().len(), room);
    let long = record(&header, vec![0; MAX_RECORD_BYTES as usize / 4], 0, 1);
    assert!(matches!(encode_record(&header, &long), Err(RecordError::TooLarge { .. })));
}

#[test]
fn records_without_the_form_of_their_header_are_refused() {
    let header = header(3, 8, 2, true);
    let good = record(&header, vec![1, 2], 1, 0);
    let refused = |change: fn(&mut ActivationRecord)| {
        let mut record = good.clone();
        change(&mut record);
        encode_record(&header, &record).unwrap_err().to_string()
    };
    assert!(refused(|r| r.prompt.clear()).contains("`prompt`"));
    assert!(refused(|r| r.prefill.truncate(1)).contains("`prefill` has 1 values, expected 24"));
    assert!(refused(|r| r.decode.push(1)).contains("`decode`"));
    assert!(refused(|r| r.experts = None).contains("`experts`: is missing"));
    assert!(refused(|r| r.experts = Some(vec![0])).contains("expected 18"));
    assert!(refused(|r| r.experts = Some(vec![8; 18])).contains("that the model lacks"));
    assert!(refused(|r| r.steps = 2).contains("expected 24"));
}

#[test]
fn incomplete_header_is_rewritten() {
    let (header, _) = three();
    let encoded = encode_header(&header).unwrap();
    for cut in [0, 1, 40, encoded.len() - 1] {
        assert_eq!(resume_position(&encoded[..cut], &header).unwrap(), 0);
    }
    assert_eq!(resume_position(encoded.as_slice(), &header).unwrap(), encoded.len() as u64);
    assert!(resume_position(b"other text".as_slice(), &header).is_err());
}

#[test]
fn headers_that_describe_no_model_are_refused() {
    let refused = |change: fn(&mut RecordHeader)| {
        let mut header = header(3, 8, 2, false);
        change(&mut header);
        encode_header(&header).unwrap_err().to_string()
    };
    assert!(refused(|h| h.model = "no hex".to_owned()).contains("`model`"));
    assert!(refused(|h| h.layers.clear()).contains("`layers`"));
    assert!(refused(|h| h.layers = vec![2, 1]).contains("ascending"));
    assert!(refused(|h| h.top_k = 9).contains("`top_k`"));
    assert!(refused(|h| h.experts = 0).contains("`experts`"));
    assert!(refused(|h| h.dtype.clear()).contains("`dtype`"));
}

#[test]
fn false_beginnings_cost_bounded_work() {
    // Every 256 bytes there is the start of an apparent record of 60 MB.
    let header = header(1, 4, 1, false);
    let mut bytes = encode_header(&header).unwrap();
    let mut false_start = encode_record(&header, &record(&header, vec![0; 1_000_000], 0, 0)).unwrap();
    let text = String::from_utf8_lossy(&false_start[10..200]).replace("1000000", "15000000");
    false_start.truncate(10);
    false_start.extend_from_slice(text.as_bytes());
    for _ in 0..300_000 {
        bytes.extend_from_slice(&false_start[..192]);
    }
    let scan = scan(bytes.as_slice()).unwrap();
    assert_eq!(scan.records, 0);
    assert_eq!(scan.damage.len(), 1);
    assert_eq!(scan.damage[0].bytes.end, bytes.len() as u64);
}
