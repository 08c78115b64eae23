"""The mathematics behind the accountants: functions of plain numbers and arrays, without state."""
