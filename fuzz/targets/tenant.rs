#![no_main]
remoe_fuzz::target!(tenant);
