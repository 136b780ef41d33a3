//! Function that opens a device.

use moeflux_base::Error;
use moeflux_compute::{Device, DeviceId};

/// Opens a device by name, with an id that the cards of a device share.
pub(super) type OpenDevice<'a> =
    dyn Fn(&str, Option<DeviceId>) -> Result<Box<dyn Device>, Error> + 'a;
