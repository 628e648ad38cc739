/* The CPU as a device. */
#ifndef RA_DEVICE_CPU_DEVICE_H
#define RA_DEVICE_CPU_DEVICE_H

#include "device/device.h"

extern const ra_device_ops ra_cpu_device;

#endif
