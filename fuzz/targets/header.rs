#![no_main]
remoe_fuzz::target!(header);
